"""Other shapes of a trace: longer prompts, requests in bursts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from devtools.bench.traces import TracedRequest

# All requests of so many seconds come within the first part of them.
_BURST_SECONDS = 20.0
_BURST_SHARE = 0.1


def longer(trace: Sequence[TracedRequest]) -> list[TracedRequest]:
    """The same requests with two blocks for each one."""
    return [
        replace(
            request,
            hash_ids=tuple(number for each in request.hash_ids for number in (2 * each, 2 * each + 1)),
            input_tokens=2 * request.input_tokens,
        )
        for request in trace
    ]


def in_bursts(trace: Sequence[TracedRequest]) -> list[TracedRequest]:
    """The same requests in the same order: those of each 20 s come within its first 2 s."""
    return [replace(request, at_seconds=_in_burst(request.at_seconds)) for request in trace]


def _in_burst(at_seconds: float) -> float:
    rest = at_seconds % _BURST_SECONDS
    return at_seconds - rest + rest * _BURST_SHARE


SHAPES: dict[str, Callable[[Sequence[TracedRequest]], list[TracedRequest]]] = {
    "plain": list,
    "longer": longer,
    "bursts": in_bursts,
}
