"""A rank above 0 that joins rank 0 over TCP, and computes for it until it ends."""

import asyncio
import os
import socket
import sys
import time
from functools import partial
from typing import Any

import structlog
import torch

from baton.errors import EngineFailed
from runtime.aio import timeout, wait_until_done
from runtime.threads import daemon_call
from services.engines.context import RankProgress
from services.engines.pytorch.config import MultiNodeOptions, PyTorchConfig
from services.engines.pytorch.kv_cache.memory import open_memory
from services.engines.pytorch.kv_cache.pool_size import layout_of
from services.engines.pytorch.parallel.followers import check_split, shard_of
from services.engines.pytorch.parallel.joining import SeveralHosts, join
from services.engines.pytorch.parallel.local_follower import load_part, obey
from services.engines.pytorch.parallel.messages import Begin
from services.engines.pytorch.parallel.multi_node.link import (
    HANDSHAKE_BYTES,
    Join,
    Link,
    Refused,
    Welcome,
    receive_message,
    send_message,
    settings_of,
)
from services.engines.pytorch.runners.selection import fused_runner
from services.engines.running import metrics

_log = structlog.get_logger(__name__)

_ATTEMPT_SECONDS = 5.0
_PAUSE_SECONDS = 1.0


async def follow(config: PyTorchConfig, progress: RankProgress, stopping: asyncio.Event) -> None:
    """Joins rank 0 and computes for it, until rank 0 says that this is the end.

    Until the group is ready, `stopping` ends it too; afterwards rank 0 decides when, since it may be draining. Raises
    ConfigError for a wrong setting, and EngineFailed if rank 0 cannot be reached, refuses this rank, or ends.
    """
    options = config.multi_node
    assert options is not None
    await asyncio.to_thread(check_split, config)
    settings = await asyncio.to_thread(settings_of, config)
    joining = asyncio.ensure_future(_joined(options, Join(options.rank, tuple(settings.items()))))
    if not await _unless(stopping, joining):
        return
    link = joining.result()
    metrics.introduce_rank(options.rank, config.tensor_parallel_size, options.leader, config.served_name)
    _log.info("joined", rank=options.rank, leader=options.leader)
    computing = daemon_call(partial(_compute, config, link, progress), "baton-rank")
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(_reason: str) -> None:
        loop.call_soon_threadsafe(ended.set)

    link.on_end(end)
    try:
        await _first(computing, ended, stopping, progress)
        if link.ended:
            raise EngineFailed(f"rank 0 has ended: {link.ended}")
        if computing.done():
            computing.result()
    except (EOFError, RuntimeError, OSError) as error:
        raise EngineFailed(f"rank {options.rank} of the engine failed: {error}") from error
    finally:
        computing.cancel()
        link.close()


async def _first(
    computing: "asyncio.Future[None]", ended: asyncio.Event, stopping: asyncio.Event, progress: RankProgress
) -> None:
    """Waits for the end of the work, or of rank 0; and for `stopping` unless the group is ready by then."""
    losing: asyncio.Future[Any]
    stop: asyncio.Future[Any]
    losing, stop = asyncio.ensure_future(ended.wait()), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([computing, losing, stop], return_when=asyncio.FIRST_COMPLETED)
        if stop.done() and progress.is_ready:
            _log.info("computing until rank 0 ends")
            await asyncio.wait([computing, losing], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (losing, stop):
            task.cancel()
        await wait_until_done(losing, stop)


async def _unless(stopping: asyncio.Event, joining: "asyncio.Future[Any]") -> bool:
    """Waits for the future. False, and the future is cancelled, if `stopping` comes first."""
    stop: asyncio.Future[Any] = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([joining, stop], return_when=asyncio.FIRST_COMPLETED)
        return joining.done()
    finally:
        for task in (joining, stop):
            task.cancel()
        await wait_until_done(joining, stop)


async def _joined(options: MultiNodeOptions, request: Join) -> Link:
    """Connects, as often as needed, until rank 0 is there."""
    problem = ""
    try:
        async with timeout(options.join_seconds):
            while True:
                try:
                    return await asyncio.to_thread(_join, options, request)
                except (OSError, EOFError) as error:
                    if str(error) != problem:
                        problem = str(error)
                        _log.info("waiting for rank 0", leader=options.leader, problem=problem)
                await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError as error:
        raise EngineFailed(
            f"engine.multi_node.leader: {options.leader} could not be joined within {options.join_seconds:g} s: "
            f"{problem}"
        ) from error


def _join(options: MultiNodeOptions, request: Join) -> Link:
    host, _, port = options.leader.rpartition(":")
    connected = socket.create_connection((host.strip("[]"), int(port)), _ATTEMPT_SECONDS)
    try:
        send_message(connected, request)
        answer = receive_message(connected, HANDSHAKE_BYTES)
        if isinstance(answer, Welcome):
            return Link(connected, 0, options.lost_seconds)
    except ValueError as error:
        connected.close()
        raise EngineFailed(f"engine.multi_node.leader: {options.leader} does not answer as a rank: {error}") from error
    except (OSError, EOFError):
        connected.close()
        raise
    connected.close()
    reason = answer.reason if isinstance(answer, Refused) else "the answer is not from a rank"
    raise EngineFailed(f"engine.multi_node: rank 0 refused this rank: {reason}")


def _compute(config: PyTorchConfig, link: Link, progress: RankProgress) -> None:
    assert config.multi_node is not None
    began = time.monotonic()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    shard = shard_of(config, config.multi_node.rank)
    with torch.inference_mode():
        model = load_part(shard, config, link)
        progress.loaded(time.monotonic() - began)
        begin = link.recv()
        assert isinstance(begin, Begin)
        memory = open_memory(layout_of(config, model), begin.num_blocks, model.device)
        meeting = SeveralHosts(link.peer_address, begin.store_port, link.own_address)
        ranks = join(shard, meeting, model.device)
        obey(fused_runner(model, memory.tensor, begin.sizes, ranks), memory.tensor, shard, link, progress)
    if model.device.type == "cuda":
        _log.info("rank 0 has ended")
        sys.stderr.flush()
        os._exit(0)  # NCCL would wait for the other ranks
