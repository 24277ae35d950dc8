"""Rank 0's side of ranks that join over TCP: it waits for them, tells them each step, and notices their end."""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import structlog
import torch

from baton.errors import ConfigError, EngineFailed
from runtime.aio import timeout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.parallel.followers import LOAD_SECONDS, check_split, shard_of
from services.engines.pytorch.parallel.joining import join, open_store
from services.engines.pytorch.parallel.messages import Begin, Loaded, NotLoaded, Order, Ready, ZeroBlocks
from services.engines.pytorch.parallel.multi_node.link import (
    HANDSHAKE_BYTES,
    Join,
    Link,
    Refused,
    Welcome,
    differences,
    receive_message,
    send_message,
    settings_of,
)
from services.engines.pytorch.parallel.ranks import Ranks
from services.engines.pytorch.runners.fused_runner import Sizes
from services.engines.running import metrics
from services.keeper.client import KeeperClient

_log = structlog.get_logger(__name__)

_HANDSHAKE_SECONDS = 5.0
_CLOSE_SECONDS = 5.0


async def gather(config: PyTorchConfig) -> "RemoteFollowers | None":
    """Waits until all other ranks have joined. Returns None if they are not to join, but to be started.

    Raises ConfigError if the model cannot be split or it cannot listen, and EngineFailed, naming the ranks, if some
    are missing after `join_seconds`.
    """
    options = config.multi_node
    if options is None:
        return None
    await asyncio.to_thread(check_split, config)
    settings = await asyncio.to_thread(settings_of, config)
    links: dict[int, Link] = {}
    others = range(1, config.tensor_parallel_size)
    with _listener(options.leader) as listener:
        _log.info("waiting for the other ranks", ranks=list(others), port=listener.getsockname()[1])
        try:
            async with timeout(options.join_seconds):
                while not all(_is_there(links, rank) for rank in others):
                    accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
                    link = await asyncio.to_thread(_greet, accepted, settings, links, config)
                    if link is not None:
                        links[link.rank] = link
                        _log.info("a rank has joined", rank=link.rank, address=link.peer_address)
        except BaseException as error:
            for link in links.values():
                link.close()
            if not isinstance(error, TimeoutError):
                raise
            missing = ", ".join(str(rank) for rank in others if rank not in links)
            raise EngineFailed(
                f"engine.multi_node: of {config.tensor_parallel_size} ranks, {missing} did not join at "
                f"{options.leader} within {options.join_seconds:g} s"
            ) from error
    return RemoteFollowers(config, [links[rank] for rank in others])


class RemoteFollowers:
    """Followers that have joined; it owns their connections. Each has a pool of its own heads."""

    def __init__(self, config: PyTorchConfig, links: Sequence[Link]) -> None:
        self.shard = shard_of(config, 0)
        self.failure: str | None = None
        self._links = links
        self._ranks: Ranks | None = None
        self._gate = threading.Lock()
        for link in links:
            link.on_end(partial(self._lose, link.rank))
        assert config.multi_node is not None
        metrics.introduce_rank(0, self.shard.size, config.multi_node.leader, config.served_name)

    def least_blocks(self, num_blocks: int) -> int:
        return min(num_blocks, *(self._loaded(link) for link in self._links))

    def begin(self, num_blocks: int, sizes: Sizes, pool_file: int | None, device: torch.device) -> Ranks:
        del pool_file
        meeting = open_store(self._links[0].own_address, self.shard.size)
        self.send(Begin(num_blocks, sizes, meeting.port))
        self._ranks = join(self.shard, meeting, device)
        return self._ranks

    def send(self, order: Order) -> None:
        for link in self._links:
            if self.failure is not None:
                raise RuntimeError(self.failure)
            try:
                link.send(order)
            except OSError as error:
                raise RuntimeError(self.failure or f"rank {link.rank} of the engine has ended: {error}") from error
        if isinstance(order, Ready):
            metrics.RANK_READY.set(1)

    def replace_earlier(self, keeper: KeeperClient) -> None:
        """No-op: ranks that are started for themselves have no keeper."""

    def zero(self, block_ids: Sequence[int]) -> None:
        self.send(ZeroBlocks(tuple(block_ids)))

    def close(self) -> None:
        """Ends the other ranks. May be called twice."""
        for link in self._links:
            with suppress(OSError):  # it may have ended
                link.send(None)
        for link in self._links:
            link.close(0 if self.failure else _CLOSE_SECONDS)
        if self._ranks is not None:
            self._ranks.stop()

    def _loaded(self, link: Link) -> int:
        try:
            answer = link.recv(LOAD_SECONDS)
        except TimeoutError as error:
            raise EngineFailed(f"rank {link.rank} did not load the model within {LOAD_SECONDS:g} s") from error
        except EOFError as error:
            raise EngineFailed(f"rank {link.rank} ended while it loaded the model: {error}") from error
        if isinstance(answer, NotLoaded):
            raise EngineFailed(f"rank {link.rank} cannot load the model: {answer.reason}")
        assert isinstance(answer, Loaded)
        return answer.num_blocks

    def _lose(self, rank: int, reason: str) -> None:
        with self._gate:
            if self.failure is not None:
                return
            self.failure = f"rank {rank} of the engine has ended: {reason}"
        metrics.RANK_READY.set(0)
        _log.error("a rank of the engine has ended", rank=rank, reason=reason)
        if self._ranks is not None:
            self._ranks.stop()


def _listener(leader: str) -> socket.socket:
    """Listens at an IP address, or on all of this host's if the leader is named otherwise."""
    host, _, port = leader.rpartition(":")
    host = host.strip("[]")
    try:
        if _is_address(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, int(port)), family=family)
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", int(port)))
    except OSError as error:
        raise ConfigError(f"engine.multi_node.leader: cannot listen at {leader!r}: {error}") from error
    listener.setblocking(False)
    return listener


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _greet(
    accepted: socket.socket, settings: Mapping[str, str], links: Mapping[int, Link], config: PyTorchConfig
) -> Link | None:
    """Returns the link to a rank that may join; others are told why not."""
    assert config.multi_node is not None
    accepted.settimeout(_HANDSHAKE_SECONDS)
    try:
        request = receive_message(accepted, HANDSHAKE_BYTES)
        reason = _obstacle(request, settings, links, config.tensor_parallel_size)
        send_message(accepted, Refused(reason) if reason else Welcome())
        if not reason:
            return Link(accepted, request.rank, config.multi_node.lost_seconds)
    except (OSError, EOFError, ValueError) as error:
        reason = str(error) or "it closed the connection"
    _log.warning("connection refused: not a rank of this group", reason=reason)
    accepted.close()
    return None


def _obstacle(request: object, settings: Mapping[str, str], links: Mapping[int, Link], size: int) -> str:
    """Returns why this rank may not join; empty if it may."""
    if not isinstance(request, Join):
        return "its first message is not that of a rank"
    if not 0 < request.rank < size:
        return f"rank {request.rank} does not exist in a group of {size}"
    if _is_there(links, request.rank):
        return f"rank {request.rank} has joined already"
    return differences(request.rank, dict(request.settings), settings)


def _is_there(links: Mapping[int, Link], rank: int) -> bool:
    return rank in links and not links[rank].ended
