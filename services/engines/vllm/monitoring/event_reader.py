"""Reads KV events from vLLM's sockets. Lost ones are asked for again; if vLLM has them no more, all is forgotten.

The contents of vLLM's prefix cache, by the hash chain that routers know from other engines.

vLLM's own hashes mean nothing outside it. Each stored block names its parent, so that our chain is built link by link;
the root of a chain is that of its salt and its adapter, whose name in vLLM is our seed of it. Images are in their
blocks by digest and place. Chains with anything else are left out, and those of handoffs, whose salt no other request
has.
"""

import asyncio
import importlib
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from typing_extensions import Self

from engine_protocol.prefix_hash import block_hash, media_key, root_hash
from runtime.aio import timeout
from runtime.lasting import lasting
from services.engines.external.surroundings import free_ports
from services.engines.kv_events import KvChange, KvPublisher, KvTier
from services.engines.prompt import MediaSpan
from services.engines.vllm.loading import EventEndpoints
from services.engines.vllm.monitoring import metrics
from services.engines.vllm.requests.builder import HANDOFF_SALT
from services.engines.vllm.requests.media import span_named

# vLLM's media: those that the OffloadingConnector reports as CPU may be in the pool, too.
_TIERS = {"GPU": KvTier.DEVICE, None: KvTier.DEVICE, "CPU": KvTier.HOST}
# Blocks in other memory, and those of sliding windows, do not save a prompt's computation alone.
_KINDS = ("full_attention", None)


class CachedChains:
    """Converts the events of one rank, in order, and tells the publisher."""

    def __init__(self, rank: int, block_tokens: int, publisher: KvPublisher) -> None:
        self._rank = rank
        self._block_tokens = block_tokens
        self._publisher = publisher
        self._ours: dict[int | bytes, bytes] = {}
        self._blocks: dict[KvTier, set[int | bytes]] = {KvTier.DEVICE: set(), KvTier.HOST: set()}

    def __len__(self) -> int:
        return len(self._ours)

    def feed(self, event: Mapping[str, Any]) -> None:
        """Notes one event; those of other kinds of blocks are skipped."""
        match event.get("type"):
            case "AllBlocksCleared":
                self.forget()
            case "BlockStored" if self._is_prompt_block(event):
                self._stored(event)
            case "BlockRemoved" if event.get("medium") in _TIERS:
                for theirs in event["block_hashes"]:
                    self._removed(theirs, _TIERS[event.get("medium")])

    def forget(self) -> None:
        """Removes all blocks: events were lost, or the cache was cleared."""
        for tier in (KvTier.HOST, KvTier.DEVICE):
            for theirs in list(self._blocks[tier]):
                self._removed(theirs, tier)

    def _is_prompt_block(self, event: Mapping[str, Any]) -> bool:
        plain = event.get("medium") in _TIERS and event.get("kv_cache_spec_kind") in _KINDS
        whole = event.get("block_size") == self._block_tokens
        return plain and whole and not event.get("group_idx")

    def _stored(self, event: Mapping[str, Any]) -> None:
        hashes, tokens, size = event["block_hashes"], event["token_ids"], self._block_tokens
        keys: Sequence[Any] = event.get("extra_keys") or [None] * len(hashes)
        if len(tokens) != size * len(hashes) or len(keys) != len(hashes):
            return
        lora = event.get("lora_name") or ""
        parts = [_parts(_without(lora, each)) for each in keys]
        parent = event.get("parent_block_hash")
        previous = _root(parts[0].others, lora) if parent is None else self._ours.get(parent)
        for index, theirs in enumerate(hashes):
            # The first block of a chain has the salt.
            if previous is None or (parts[index].others and not (index == 0 and parent is None)):
                return
            media = media_key(parts[index].media, 0, size)
            previous = block_hash(previous, tokens[index * size : (index + 1) * size], media)
            self._ours[theirs] = previous
            self._blocks[_TIERS[event.get("medium")]].add(theirs)
            self._tell(theirs)

    def _removed(self, theirs: int | bytes, tier: KvTier) -> None:
        if theirs in self._blocks[tier]:
            self._blocks[tier].discard(theirs)
            self._tell(theirs)

    def _tell(self, theirs: int | bytes) -> None:
        """Publishes the fastest tier that has a block."""
        tier = next((tier for tier, blocks in self._blocks.items() if theirs in blocks), None)
        if tier is None:
            self._publisher.removed(self._ours.pop(theirs), self._rank)
        else:
            self._publisher.stored(self._ours[theirs], self._rank, tier)


@dataclass(frozen=True, slots=True)
class _BlockKeys:
    """vLLM's keys of a block: its images, placed from its first token on, and other ones."""

    media: tuple[MediaSpan, ...]
    others: tuple[Any, ...]


def _parts(keys: Sequence[Any]) -> _BlockKeys:
    media, others = [], []
    for key in keys:
        match key:
            case [name, int(start)] if (span := span_named(name, start)) is not None:
                media.append(span)
            case _:
                others.append(key)
    return _BlockKeys(tuple(media), tuple(others))


def _without(lora: str, keys: Any) -> list[Any]:
    """The keys of a block without its adapter's, which vLLM puts first."""
    found = list(keys or ())
    return found[1:] if lora and found[:1] == [lora] else found


def _root(keys: Sequence[Any], lora: str) -> bytes | None:
    """The root of a chain whose first block has these keys; None for one that is left out."""
    match keys:
        case []:
            return root_hash("", lora)
        case [str(salt)] if not salt.startswith(HANDOFF_SALT):
            return root_hash(salt, lora)
        case _:
            return None


log = structlog.get_logger(__name__)

_HOST = "127.0.0.1"
_REPLAY_SECONDS = 5.0
_END = (-1).to_bytes(8, "big", signed=True)
# Events between two turns of the loop.
_AT_ONCE = 64


@contextmanager
def event_sockets(ranks: int) -> Iterator[EventEndpoints]:
    """Yields endpoints for an engine of this host: files for one rank, neighbouring ports for several."""
    if ranks > 1:
        first = free_ports(_HOST, 2 * ranks)
        yield EventEndpoints(f"tcp://{_HOST}:{first}", f"tcp://{_HOST}:{first + ranks}")
        return
    with tempfile.TemporaryDirectory(prefix="baton-vllm-") as folder:
        yield EventEndpoints(f"ipc://{Path(folder) / 'events'}", f"ipc://{Path(folder) / 'replay'}")


class EventReader:
    """Follows all ranks of one engine while its context is open. Without endpoints it reads nothing."""

    def __init__(self, endpoints: EventEndpoints | None, ranks: int, block_tokens: int) -> None:
        self._endpoints = endpoints
        self._publisher = KvPublisher(ranks)
        self._chains = [CachedChains(rank, block_tokens, self._publisher) for rank in range(ranks)]
        self._reading: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self._endpoints is None:
            return self
        for rank, chains in enumerate(self._chains):
            following = _Rank(_offset(self._endpoints, rank), chains)
            self._reading.append(asyncio.create_task(lasting("vllm_kv_events", following.follow)))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._reading:
            task.cancel()
        if self._reading:
            await asyncio.wait(self._reading)

    def changes(self) -> AsyncGenerator[KvChange, None]:
        return self._publisher.changes()


class _Rank:
    """The socket of one rank, and the number of the event that is expected next."""

    def __init__(self, endpoints: EventEndpoints, chains: CachedChains) -> None:
        self._endpoints = endpoints
        self._chains = chains
        self._expected = 0
        self._zmq: Any = importlib.import_module("zmq")
        self._new_context = importlib.import_module("zmq.asyncio").Context
        self._decode = importlib.import_module("msgspec.msgpack").decode

    async def follow(self) -> None:
        """Reads until cancelled. After an error it may be called again, and reads all events anew."""
        self._context = self._new_context()
        self._chains.forget()
        self._expected = 0
        socket = self._context.socket(self._zmq.SUB)
        try:
            socket.setsockopt(self._zmq.SUBSCRIBE, b"")
            socket.set_hwm(0)
            # vLLM listens at a file itself, and connects to a port.
            is_file = self._endpoints.events.startswith("ipc")
            (socket.connect if is_file else socket.bind)(self._endpoints.events)
            # Those from before the subscription.
            await self._ask_again()
            while True:
                for _ in range(_AT_ONCE):
                    frames = await socket.recv_multipart()
                    await self._received(_number(frames), frames[-1])
                await asyncio.sleep(0)
        finally:
            socket.close(linger=0)
            self._context.destroy(linger=0)

    async def _received(self, number: int, payload: bytes) -> None:
        if number > self._expected:
            await self._ask_again()
        if number > self._expected:
            self._forget()
            self._expected = number
        self._receive(number, payload)

    def _forget(self) -> None:
        metrics.KV_EVENT_GAPS.inc()
        self._chains.forget()

    def _receive(self, number: int, payload: bytes) -> None:
        # Less: it was asked for again, and came twice.
        if number != self._expected:
            return
        self._expected += 1
        try:
            for event in self._decode(payload)[1]:
                self._chains.feed(event)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            log.warning("vllm's KV events cannot be read", number=number, error=f"{type(error).__name__}: {error}")
            self._forget()

    async def _ask_again(self) -> None:
        """Takes all events that vLLM still has, from the expected one."""
        socket = self._context.socket(self._zmq.DEALER)
        try:
            async with timeout(_REPLAY_SECONDS):
                socket.connect(self._endpoints.replay)
                await socket.send_multipart([b"", self._expected.to_bytes(8, "big")])
                while True:
                    frames: Sequence[bytes] = await socket.recv_multipart()
                    if frames[-2] == _END:
                        return
                    self._receive(_number(frames), frames[-1])
        except TimeoutError:
            log.warning("vllm sends no KV events again", endpoint=self._endpoints.replay)
        finally:
            socket.close(linger=0)


def _number(frames: Sequence[bytes]) -> int:
    """The sequence number precedes the payload; versions differ in what precedes both."""
    return int.from_bytes(frames[-2], "big")


def _offset(endpoints: EventEndpoints, rank: int) -> EventEndpoints:
    """vLLM adds the rank to the port."""
    if rank == 0:
        return endpoints
    return EventEndpoints(
        *(f"{host}:{int(port) + rank}" for host, port in map(_split, (endpoints.events, endpoints.replay)))
    )


def _split(endpoint: str) -> tuple[str, str]:
    host, _, port = endpoint.rpartition(":")
    return host, port
