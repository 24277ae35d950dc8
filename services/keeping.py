"""A worker that has a keeper: the signs of life that it gives, and the socket that outlives it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from baton.errors import ConfigError
from baton_http2.sockets.accepting import open_sockets
from runtime.aio import wait_until_done
from runtime.network import split_address
from services.config import KeepMemoryConfig
from services.keeper.client import KeeperClient
from services.keeper.messages import KeeperLost
from services.telemetry import metrics

log = structlog.get_logger(__name__)

_BEAT_SECONDS = 0.5
_LISTEN = "listen"


@asynccontextmanager
async def beating(keeper: KeeperClient | None, stopping: asyncio.Event) -> AsyncIterator[None]:
    """Gives signs of life while the context is open. A worker that has lost its keeper stops: another one may start."""
    if keeper is None:
        yield
        return
    task = asyncio.create_task(_beat(keeper, stopping))
    try:
        yield
    finally:
        task.cancel()
        await wait_until_done(task)


def begin_start(keeper: KeeperClient | None, wanted: KeepMemoryConfig) -> None:
    """Tells how long the start may take, and has the keeper free what is not to be kept: the process before this one
    may have had another configuration.
    """
    if keeper is None:
        return
    keeper.begin(wanted.start_seconds)
    for name, is_wanted in {"weights": wanted.weights, "kv": wanted.kv, _LISTEN: wanted.is_on}.items():
        if not is_wanted:
            keeper.drop(name)


def note_start(keeper: KeeperClient | None, hang_seconds: float) -> None:
    """The worker is ready: it tells why it was started, and is killed from now on if it gives no sign of life."""
    if keeper is None:
        return
    keeper.watch(hang_seconds)
    start = keeper.start
    if start.starts:
        metrics.RESTARTS.labels(start.ended_by).inc()
        seconds = keeper.seconds_since_loss()
        metrics.RESTART_SECONDS.set(seconds)
        log.warning("worker was started again", cause=start.ended_by, starts=start.starts, seconds=round(seconds, 3))


def kept_sockets(keeper: KeeperClient | None, listen: str) -> Sequence[socket.socket]:
    """The sockets that listen at `listen`, also while no worker runs; none without a keeper. Raises ConfigError."""
    if keeper is None:
        return ()
    if found := keeper.get(_LISTEN, listen).descriptors:
        return [socket.socket(fileno=number) for number in found]
    host, port = split_address(listen, "listen")
    try:
        sockets = open_sockets(host, port)
    except OSError as error:
        raise ConfigError(f"listen: cannot listen on {listen!r}; is the port taken?") from error
    keeper.put(_LISTEN, listen, [each.fileno() for each in sockets])
    return sockets


async def _beat(keeper: KeeperClient, stopping: asyncio.Event) -> None:
    try:
        while True:
            keeper.beat()
            await asyncio.sleep(_BEAT_SECONDS)
    except KeeperLost:
        log.warning("the keeper is lost; the worker stops")
        stopping.set()
