"""What a running TensorRT-LLM tells of itself, and who hears of it: the load, metrics, and readers of KV events."""

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from typing_extensions import Self

from rpc.errors import Unsupported
from services.engines.trtllm import metrics
from services.engines.trtllm.arguments import KvCacheArguments
from services.engines.trtllm.fan_out import FanOut
from services.engines.trtllm.kv_index import KvIndex
from services.engines.trtllm.native import NativeMetrics
from services.engines.trtllm.poller import Polled, Poller
from services.engines.trtllm.statistics import Statistics, read_iteration
from services.kv_events import KvChange


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who else wants to know: `progressed` of an iteration, `looked` of each look, also where there was nothing."""

    progressed: Callable[[], None]
    looked: Callable[[], None]


class Telling:
    """Follows an engine while the context is open."""

    def __init__(self, llm: Any, cache: KvCacheArguments, native: NativeMetrics, listeners: Listeners) -> None:
        self._llm = llm
        self._native = native
        self._listeners = listeners
        self._has_events = cache.event_buffer_max_size > 0 and cache.enable_block_reuse
        self._index = KvIndex(cache.tokens_per_block)
        self._fan_out = FanOut(self._index)
        self.statistics = Statistics()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._native.publish()
            stack.callback(self._native.withdraw)
            poller = Poller(self._llm, self._deliver, has_events=self._has_events)
            await stack.enter_async_context(poller)
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        """See TellsKv."""
        if not self._has_events:
            raise Unsupported(
                "KV events are off: kv_cache_config.event_buffer_max_size is 0, or enable_block_reuse is off"
            )
        return self._fan_out.changes()

    def _deliver(self, polled: Polled) -> None:
        for stat in _flat(polled.stats):
            self._native.note_iteration(stat)
            if self.statistics.note(read_iteration(stat)):
                self._listeners.progressed()
        gaps = self._index.gaps
        for event in _flat(polled.events):
            self._fan_out.tell(self._index.feed(event))
        metrics.KV_EVENT_GAPS.inc(self._index.gaps - gaps)
        self._listeners.looked()


def _flat(found: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Versions answer dictionaries, JSON of them, or lists of either."""
    for one in found:
        parsed = json.loads(one) if isinstance(one, str) else one
        if isinstance(parsed, list):
            yield from _flat(parsed)
        else:
            yield parsed
