"""The spans and attributes of a worker's stages, from the engine's own times."""

from collections.abc import Sequence

from baton.inference.v1 import timing_pb2
from rpc.tracing.span import Attributes, AttributeValue, Span, current_span
from runtime.clock import perf_counter
from services.engines.answer import Finished
from services.engines.kv import HeldKv
from services.handoff.remote_handoff import Handoff
from services.telemetry.timings import DecodeClock, Timing


def prefilled(timings: Sequence[Timing], kv: HeldKv, prompt_tokens: int) -> None:
    """Records a prompt that waited and was computed, until now."""
    span = current_span()
    if not span.is_recording:
        return
    seconds = {timing.stage: timing.seconds for timing in timings}
    ended = perf_counter()
    computing = ended - seconds[timing_pb2.STAGE_PREFILL_COMPUTE]
    span.stage("queue", computing - seconds[timing_pb2.STAGE_PREFILL_QUEUE], computing, {})
    tokens = {"baton.prompt_tokens": prompt_tokens, "baton.cached_tokens": kv.cached_tokens}
    span.stage("compute", computing, ended, {**tokens, "baton.blocks": len(kv.block_ids)})


def record_taken_over(span: Span, handoff: Handoff, timings: tuple[Timing, ...]) -> None:
    """Records a handoff that was pulled and confirmed."""
    span.set({"baton.handoff.confirmed": True, "baton.handoff.blocks": len(handoff.block_ids)})
    for timing in timings:
        if timing.stage == timing_pb2.STAGE_HANDOFF_WAIT:
            span.set({"baton.handoff.wait_seconds": timing.seconds})
        else:
            moved(span, "baton.handoff", timing)


def decoded(finished: Finished, clock: DecodeClock, tokens: int) -> None:
    """Records a decode with its number of tokens and the times of its stages on this worker."""
    span = current_span()
    if not span.is_recording:
        return
    computing = clock.began + finished.queue_seconds
    steps = computing + finished.prefill_seconds
    span.stage("queue", clock.began, computing, {})
    if not clock.is_pulled:
        prompt = {"baton.prompt_tokens": finished.prompt_tokens, "baton.cached_tokens": finished.cached_tokens}
        span.stage("compute", computing, steps, prompt)
    span.stage("decode steps", steps, steps + finished.decode_seconds, _figures(finished, clock, tokens))


def moved(span: Span, prefix: str, timing: Timing) -> None:
    """Records a transfer: bytes, transport and rate."""
    span.set(_moved(prefix, timing))


def _figures(finished: Finished, clock: DecodeClock, tokens: int) -> Attributes:
    figures: dict[str, AttributeValue] = {
        "baton.completion_tokens": tokens,
        "baton.finish_reason": finished.reason.name.lower(),
    }
    if clock.first_at is not None:
        figures["baton.decode.first_token_seconds"] = clock.first_at - clock.asked
    if tokens:
        figures["baton.decode.seconds_per_token"] = finished.decode_seconds / tokens
    return figures


def _moved(prefix: str, timing: Timing) -> Attributes:
    said: dict[str, AttributeValue] = {
        f"{prefix}.bytes": timing.num_bytes,
        f"{prefix}.transport": timing.transport,
        f"{prefix}.transfer_seconds": timing.seconds,
    }
    if timing.cached_bytes:
        said[f"{prefix}.cached_bytes"] = timing.cached_bytes
    if timing.early_bytes:
        said[f"{prefix}.early_bytes"] = timing.early_bytes
    if (num_bytes := timing.num_bytes - timing.early_bytes) and timing.seconds:
        said[f"{prefix}.gigabytes_per_second"] = num_bytes / timing.seconds / 1e9
    return said
