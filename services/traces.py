"""What a worker's stages leave in the trace of their request: the engine's own times, never measured again."""

import time

from baton.inference.v1 import timing_pb2

from rpc.tracing.span import Attributes, AttributeValue, Span, current_span
from services.engine import Finished, HeldKv, Prompt, Tokens
from services.handoffs import Handoff, Timing


def prefilled(started: float, kv: HeldKv, prompt_tokens: int) -> None:
    """A prompt that waited and was computed, from `started` of time.perf_counter on."""
    span = current_span()
    computing = started + kv.queue_seconds
    span.stage("queue", started, computing, {})
    tokens = {"baton.prompt_tokens": prompt_tokens, "baton.cached_tokens": kv.cached_tokens}
    span.stage("compute", computing, computing + kv.compute_seconds, {**tokens, "baton.blocks": len(kv.block_ids)})


def taken_over(span: Span, handoff: Handoff, timings: tuple[Timing, ...]) -> None:
    """A handoff that was pulled and confirmed."""
    span.set({"baton.handoff.confirmed": True, "baton.handoff.blocks": len(handoff.block_ids)})
    for timing in timings:
        if timing.stage == timing_pb2.STAGE_HANDOFF_WAIT:
            span.set({"baton.handoff.wait_seconds": timing.seconds})
        else:
            span.set(_moved(timing))


class Decoding:
    """Follows one decode from its hand-over to the engine."""

    def __init__(self, source: object) -> None:
        self._started = time.perf_counter()
        self._is_pulled = not isinstance(source, Prompt)
        self._first_at: float | None = None
        self._tokens = 0

    def saw(self, event: Tokens | Finished) -> None:
        """Something came from the engine; its last word becomes spans."""
        if isinstance(event, Tokens):
            self._tokens += len(event.ids)
            self._first_at = self._first_at or time.perf_counter()
        else:
            self._finish(event)

    def _finish(self, finished: Finished) -> None:
        span = current_span()
        if not span.is_recording:
            return
        queued = self._started + finished.queue_seconds
        computed = queued + finished.prefill_seconds
        span.stage("queue", self._started, queued, {})
        if not self._is_pulled:
            tokens = {"baton.prompt_tokens": finished.prompt_tokens, "baton.cached_tokens": finished.cached_tokens}
            span.stage("compute", queued, computed, tokens)
        span.stage("decode steps", computed, computed + finished.decode_seconds, self._figures(finished))

    def _figures(self, finished: Finished) -> Attributes:
        figures: dict[str, AttributeValue] = {
            "baton.completion_tokens": self._tokens,
            "baton.finish_reason": finished.reason.name.lower(),
        }
        if self._first_at is not None:
            figures["baton.decode.first_token_seconds"] = self._first_at - self._started
        if self._tokens:
            figures["baton.decode.seconds_per_token"] = finished.decode_seconds / self._tokens
        return figures


def _moved(timing: Timing) -> Attributes:
    moved: dict[str, AttributeValue] = {
        "baton.handoff.bytes": timing.num_bytes,
        "baton.handoff.transport": timing.transport,
        "baton.handoff.transfer_seconds": timing.seconds,
    }
    if timing.num_bytes and timing.seconds:
        moved["baton.handoff.gigabytes_per_second"] = timing.num_bytes / timing.seconds / 1e9
    return moved
