"""The ledger of an answer, drawn: how long each stage took, and which were the longest."""

from baton.inference.v1 import generate_pb2, timing_pb2
from rich.table import Table

from client.terminal import table

BAR_WIDTH = 30


def ledger_table(finished: generate_pb2.Finished) -> Table:
    """A row a stage, in the order of the ledger, with bars in proportion, and the total."""
    total = sum(_seconds(each) for each in finished.ledger)
    longest = max((_seconds(each) for each in finished.ledger), default=0.0)
    rows = [_row(each, longest) for each in finished.ledger]
    rows.append(["total", _milliseconds(total), "", "", _counts(finished)])
    return table(["stage", "ms", "", "worker", "moved"], rows, numbers=["ms"])


def _row(timing: timing_pb2.StageTiming, longest: float) -> list[str]:
    seconds = _seconds(timing)
    bar = "█" * round(BAR_WIDTH * seconds / longest) if longest else ""
    return [_name(timing.stage), _milliseconds(seconds), bar, timing.worker_id or "router", _moved(timing, seconds)]


def _name(stage: "timing_pb2.Stage.ValueType") -> str:
    return timing_pb2.Stage.Name(stage).removeprefix("STAGE_").lower().replace("_", " ")


def _seconds(timing: timing_pb2.StageTiming) -> float:
    return timing.duration.seconds + timing.duration.nanos / 1e9


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
