"""Draws the timings of a request: the duration of each stage, with a bar."""

from collections.abc import Iterable, Sequence
from typing import cast

from google.protobuf.duration_pb2 import Duration
from grpc import aio

from baton.connection.credentials import TIMINGS_KEY
from baton.enum_names import value_name
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, timing_pb2
from cli.terminal import Table, printable, table

BAR_WIDTH = 30


def timings_table(stages: Sequence[timing_pb2.StageTiming], usage: generate_pb2.Usage | None = None) -> Table:
    """One row for each stage, in the order of the timings, with proportional bars; then the total."""
    longest = max((_seconds(each.duration) for each in stages), default=0.0)
    rows = [_row(each, longest) for each in stages]
    first = sum(_seconds(each.before_first_token) for each in stages)
    total = sum(_seconds(each.duration) for each in stages) - _overlap(stages)
    rows.append(["total", _milliseconds(total), _milliseconds(first), "", "", _counts(usage) if usage else ""])
    return table(["stage", "ms", "to first token", "", "worker", "transferred"], rows, numbers=["ms", "to first token"])


def timings_of(error: BatonError) -> Sequence[timing_pb2.StageTiming]:
    """The stages that a failed request completed; empty if the router sent none."""
    cause = error.__cause__
    if not isinstance(cause, aio.AioRpcError):
        return []
    trailers = dict(cast("Iterable[tuple[str, bytes]]", cause.trailing_metadata() or ()))
    return timing_pb2.Timings.FromString(trailers.get(TIMINGS_KEY, b"")).stages


def _overlap(stages: Sequence[timing_pb2.StageTiming]) -> float:
    """Detokenization time that overlaps with the workers' computation."""
    text = (each for each in stages if each.stage == timing_pb2.STAGE_DETOKENIZE)
    return sum(_seconds(each.duration) - _seconds(each.before_first_token) for each in text)


def _row(timing: timing_pb2.StageTiming, longest: float) -> list[str]:
    seconds, first = _seconds(timing.duration), _seconds(timing.before_first_token)
    bar = "█" * round(BAR_WIDTH * seconds / longest) if longest else ""
    shown = _milliseconds(first) if first else ""
    return [
        value_name(timing_pb2.Stage, timing.stage).replace("_", " "),
        _milliseconds(seconds),
        shown,
        bar,
        printable(timing.worker_id) or "router",
        _moved(timing, seconds),
    ]


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"


def _moved(timing: timing_pb2.StageTiming, seconds: float) -> str:
    cached = f"{_size(timing.cached_bytes)} cached" if timing.cached_bytes else ""
    if not timing.num_bytes:
        return cached
    rate = f", {timing.num_bytes / seconds / 1e9:.2f} GB/s" if seconds else ""
    return f"{_size(timing.num_bytes)} by {printable(timing.transport)}{rate}" + (f", {cached}" if cached else "")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


def _counts(usage: generate_pb2.Usage) -> str:
    prompt = f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached"
    if usage.media_tokens:
        prompt += f", {usage.media_tokens} for media"
    return f"{prompt}; {usage.completion_tokens} generated"
