"""A worker that has a keeper: the signs of life that it gives, and the socket that outlives it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from baton.errors import ConfigError, Draining, LayoutMismatch, RequestExists, Unsupported
from baton_http2.sockets.accepting import open_sockets
from runtime.aio import run_to_completion, wait_until_done
from runtime.network import split_address
from services.config import KeepMemoryConfig, WorkerConfig
from services.engines.base import Engine
from services.keeper.client import KeeperClient
from services.keeper.fork_server import IMPORTS
from services.keeper.messages import KeeperLost
from services.requests.calls import Calls
from services.sleeping.group import SLEEP_GROUP
from services.telemetry import metrics

log = structlog.get_logger(__name__)

_BEAT_SECONDS = 0.5
_SENT_SECONDS = 0.1
_LISTEN = "listen"


class Upgrader:
    """Replaces this process by one of the code and configuration of now, which goes on with what is kept."""

    def __init__(self, keeper: KeeperClient | None, engine: Engine | None, calls: Calls) -> None:
        self._keeper = keeper
        self._calls = calls
        self._engine = engine if engine is not None and engine.journal is not None else None
        self._is_running = False

    async def upgrade(self) -> None:
        """Returns once the next process is ready; this one ends between two steps soon after, when the answer is sent.

        A caller that leaves does not stop it. Raises Unsupported without kept KV, Draining amid a drain, RequestExists
        while another upgrade runs, and LayoutMismatch with the reason if the next process cannot go on with what is
        kept.
        """
        if self._keeper is None or self._engine is None:
            why = "keeps no KV (keep_memory.kv), or shares its memory (sleep.group)"
            raise Unsupported(f"the worker {why}: it cannot be upgraded in place")
        if self._calls.draining:
            raise Draining("the worker is draining, and cannot be upgraded")
        if self._is_running:
            raise RequestExists("an upgrade of this worker is running")
        self._is_running = True
        await run_to_completion(self._replace(self._keeper, self._engine))

    async def _replace(self, keeper: KeeperClient, engine: Engine) -> None:
        try:
            problem = await asyncio.to_thread(keeper.upgrade)
        except KeeperLost as error:
            raise Unsupported(f"the worker's keeper is lost, or older than upgrades in place: {error}") from error
        finally:
            self._is_running = False
        if problem:
            raise LayoutMismatch(problem)
        # The keeper kills it otherwise, amid a step.
        asyncio.get_running_loop().call_later(_SENT_SECONDS, self._end, engine)

    def _end(self, engine: Engine) -> None:
        # One that was told to stop meanwhile finishes its requests: its keeper has ended the next process.
        if not self._calls.draining:
            engine.end_process()


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


def begin_start(keeper: KeeperClient | None, config: WorkerConfig) -> None:
    """Tells how long the start may take, and has the keeper free what is not to be kept: the process before this one
    may have had another configuration.
    """
    if keeper is None:
        return
    wanted = config.keep_memory
    keeper.begin(wanted.start_seconds)
    shares = wanted.is_on and config.sleep.group is not None
    names = {"weights": wanted.weights, "kv": wanted.kv, _LISTEN: wanted.is_on, SLEEP_GROUP: shares}
    names[IMPORTS] = wanted.is_on and wanted.imports
    for name, is_wanted in names.items():
        if not is_wanted:
            keeper.drop(name)


def note_start(keeper: KeeperClient | None, wanted: KeepMemoryConfig, imported_at: float) -> None:
    """The worker is ready: it tells why it was started, and is killed from now on if it gives no sign of life.

    `imported_at` is when its code was imported, by the clock of `monotonic`.
    """
    if keeper is None:
        return
    keeper.watch(wanted.hang_seconds)
    if wanted.standby:
        keeper.stand_by()
    start = keeper.start
    if start.starts:
        metrics.RESTARTS.labels(start.ended_by).inc()
        seconds = keeper.seconds_since_loss()
        metrics.RESTART_SECONDS.set(seconds)
        imported = max(0.0, imported_at - start.ended_at)  # before the loss, if it has stood by
        took = {"seconds": round(seconds, 3), "imported_seconds": round(imported, 3)}
        log.warning("worker was started again", cause=start.ended_by, starts=start.starts, **took)


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
