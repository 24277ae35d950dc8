"""The ledger of an answer, drawn: how long each stage took, and which were the longest."""

from baton.inference.v1 import generate_pb2, timing_pb2
from google.protobuf.duration_pb2 import Duration
from rich.table import Table

from client.terminal import table

BAR_WIDTH = 30


def ledger_table(finished: generate_pb2.Finished) -> Table:
    """A row a stage, in the order of the ledger, with bars in proportion, and the total."""
    longest = max((_seconds(each.duration) for each in finished.ledger), default=0.0)
    rows = [_row(each, longest) for each in finished.ledger]
    first = sum(_seconds(each.before_first_token) for each in finished.ledger)
    total = sum(_seconds(each.duration) for each in finished.ledger) - _overlap(finished)
    rows.append(["total", _milliseconds(total), _milliseconds(first), "", "", _counts(finished)])
    return table(["stage", "ms", "to first token", "", "worker", "moved"], rows, numbers=["ms", "to first token"])


def _overlap(finished: generate_pb2.Finished) -> float:
    """What was turned into text while the workers went on."""
    text = (each for each in finished.ledger if each.stage == timing_pb2.STAGE_DETOKENIZE)
    return sum(_seconds(each.duration) - _seconds(each.before_first_token) for each in text)


def _row(timing: timing_pb2.StageTiming, longest: float) -> list[str]:
    seconds, first = _seconds(timing.duration), _seconds(timing.before_first_token)
    bar = "█" * round(BAR_WIDTH * seconds / longest) if longest else ""
    shown = _milliseconds(first) if first else ""
    return [
        _name(timing.stage),
        _milliseconds(seconds),
        shown,
        bar,
        timing.worker_id or "router",
        _moved(timing, seconds),
    ]


def _name(stage: "timing_pb2.Stage.ValueType") -> str:
    return timing_pb2.Stage.Name(stage).removeprefix("STAGE_").lower().replace("_", " ")


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"


def _moved(timing: timing_pb2.StageTiming, seconds: float) -> str:
    if not timing.num_bytes:
        return ""
    rate = f", {timing.num_bytes / seconds / 1e9:.2f} GB/s" if seconds else ""
    return f"{_size(timing.num_bytes)} by {timing.transport}{rate}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


def _counts(finished: generate_pb2.Finished) -> str:
    usage = finished.usage
    prompt = f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached"
    if usage.media_tokens:
        prompt += f", {usage.media_tokens} for media"
    return f"{prompt}; {usage.completion_tokens} generated"
