"""Watches a running TensorRT-LLM: reads its statistics and KV events, and tests it when it is idle."""

import asyncio
import json
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import structlog
from packaging.version import Version
from typing_extensions import Self

from baton.errors import Unsupported
from runtime.threads import daemon_call
from services.engines.kv_events import KvChange
from services.engines.trtllm.config import KvCacheArguments
from services.engines.trtllm.monitoring import metrics
from services.engines.trtllm.monitoring.kv_events import FanOut, ReportedBlocks
from services.engines.trtllm.monitoring.metrics import NativeMetrics, Statistics, read_iteration

log = structlog.get_logger(__name__)

_FIRST_AT_ONCE = Version("1.3.0.dev0")
_PAUSE_SECONDS = 0.05
_GIVE_UP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Polled:
    """Rows and events in order; both are empty while the engine is idle."""

    stats: Sequence[Any]
    events: Sequence[Any]


class Poller:
    """Reads in its own thread and delivers in the event loop, also when there was nothing to read.

    An async context manager. Enter it after the first request: before it, reading events fails in 1.2. If reading fails
    later, the poller ends with a warning: an engine without statistics may still compute.
    """

    def __init__(self, llm: Any, version: Version, deliver: Callable[[Polled], None], *, has_events: bool) -> None:
        self._llm = llm
        # Before 1.3 a read returns once the queue has been empty for this long, which a busy engine's rarely is.
        self._wait_seconds = 0.1 if version >= _FIRST_AT_ONCE else 0.001
        self._deliver = deliver
        self._has_events = has_events
        self._stopping = threading.Event()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        metrics.POLLING.set(1)
        self._reading = daemon_call(self._read, "trtllm-poller")
        self._reading.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stopping.set()
        # A call into an engine that hangs may never return.
        await asyncio.wait([self._reading], timeout=_GIVE_UP_SECONDS)

    def _read(self) -> None:
        while not self._stopping.is_set():
            _expect_more(self._llm)
            stats = self._drained(self._llm.get_stats)
            events = self._drained(self._llm.get_kv_cache_events) if self._has_events else []
            self._loop.call_soon_threadsafe(self._deliver, Polled(stats, events))
            if not (stats or events):
                self._stopping.wait(_PAUSE_SECONDS)

    def _drained(self, read: Callable[..., Any]) -> list[Any]:
        """Returns all waiting items. Some versions report an empty queue by an error."""
        try:
            return list(read(timeout=self._wait_seconds) or ())
        except (IndexError, queue.Empty, TimeoutError):
            return []

    def _ended(self, reading: "asyncio.Future[None]") -> None:
        metrics.POLLING.set(0)
        if not reading.cancelled() and (error := reading.exception()) is not None:
            log.warning("trtllm statistics are lost", error=f"{type(error).__name__}: {error}")


def _expect_more(llm: Any) -> None:
    """Resets a queue: before 1.3 a queue that was once empty is not read again until a request comes."""
    executor = getattr(llm, "_executor", None)
    for name in ("_iter_stats_result", "_iter_kv_events_result"):
        mark_undone = getattr(getattr(executor, name, None), "mark_undone", None)
        if mark_undone is not None:
            mark_undone()


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks: `progressed` after an iteration, `looked` after each read, even of nothing."""

    progressed: Callable[[], None]
    looked: Callable[[], None]


class Monitor:
    """Delivers an engine's statistics, metrics and KV events while its context is open."""

    def __init__(
        self, llm: Any, version: Version, cache: KvCacheArguments, native: NativeMetrics, listeners: Listeners
    ) -> None:
        self._llm = llm
        self._version = version
        self._native = native
        self._listeners = listeners
        self._has_events = cache.event_buffer_max_size > 0 and cache.enable_block_reuse
        self._index = ReportedBlocks(cache.tokens_per_block)
        self._fan_out = FanOut(self._index)
        self.statistics = Statistics()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._native.publish()
            stack.callback(self._native.withdraw)
            poller = Poller(self._llm, self._version, self._deliver, has_events=self._has_events)
            await stack.enter_async_context(poller)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._open.aclose()

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        if not self._has_events:
            raise Unsupported(
                "KV events are off: kv_cache_config.event_buffer_max_size is 0, or enable_block_reuse is off"
            )
        return self._fan_out.changes()

    def _deliver(self, polled: Polled) -> None:
        for stat in _flat(polled.stats):
            self._record_iteration(stat)
        gaps = self._index.gaps
        for event in _flat(polled.events):
            self._fan_out.tell(self._index.feed(event))
        metrics.KV_EVENT_GAPS.inc(self._index.gaps - gaps)
        self._listeners.looked()

    def _record_iteration(self, stat: Any) -> None:
        """Notes a row; one that cannot be read still says that the engine works."""
        try:
            self._native.record_iteration(stat)
            has_progressed = self.statistics.record(read_iteration(stat))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.warning("a row of statistics cannot be read", error=f"{type(error).__name__}: {error}")
            has_progressed = True
        if has_progressed:
            self._listeners.progressed()


def _flat(found: Sequence[Any]) -> Iterator[Any]:
    """Flattens dictionaries, JSON text of them, and lists of either, as versions differ. Text that is no JSON stays."""
    for one in found:
        parsed = one
        if isinstance(one, str):
            with suppress(ValueError):
                parsed = json.loads(one)
        if isinstance(parsed, list):
            yield from _flat(parsed)
        else:
            yield parsed
