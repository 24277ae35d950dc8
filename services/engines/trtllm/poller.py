"""The one reader of TensorRT-LLM's statistics and KV events: both are queues that a read empties."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import structlog
from typing_extensions import Self

from services.engines.trtllm import metrics
from services.engines.trtllm.detached import detached

log = structlog.get_logger(__name__)

_WAIT_SECONDS = 0.1
_PAUSE_SECONDS = 0.05
_GIVE_UP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Polled:
    """What there was, in order; nothing where the engine is idle."""

    stats: Sequence[Any]
    events: Sequence[Any]


class Poller:
    """Reads in a thread of its own, and delivers in the event loop, also when there was nothing.

    An async context manager. If reading fails it ends with a warning: an engine that tells nothing may still compute.
    """

    def __init__(self, llm: Any, deliver: Callable[[Polled], None], *, has_events: bool) -> None:
        self._llm = llm
        self._deliver = deliver
        self._has_events = has_events
        self._stopping = threading.Event()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        metrics.POLLING.set(1)
        self._reading = detached(self._read, "trtllm-poller")
        self._reading.add_done_callback(self._ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        # An engine that hangs may keep it in there for ever.
        await asyncio.wait([self._reading], timeout=_GIVE_UP_SECONDS)

    def _read(self) -> None:
        while not self._stopping.is_set():
            stats = _drained(self._llm.get_stats)
            events = _drained(self._llm.get_kv_cache_events) if self._has_events else []
            self._loop.call_soon_threadsafe(self._deliver, Polled(stats, events))
            if not (stats or events):
                self._stopping.wait(_PAUSE_SECONDS)

    def _ended(self, reading: "asyncio.Future[None]") -> None:
        metrics.POLLING.set(0)
        if not reading.cancelled() and (error := reading.exception()) is not None:
            log.warning("trtllm statistics are lost", error=f"{type(error).__name__}: {error}")


def _drained(read: Callable[..., Any]) -> list[Any]:
    """All that waits. Some versions say by an error that there is nothing."""
    try:
        return list(read(timeout=_WAIT_SECONDS) or ())
    except (IndexError, queue.Empty, TimeoutError):
        return []
