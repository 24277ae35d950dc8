"""Assigns GPUs to the workers of a local cluster."""

from collections.abc import Mapping, Sequence


def pinned(workers: Sequence[tuple[str, int]], gpus: Sequence[str]) -> Mapping[tuple[str, int], str]:
    """A GPU for each (role, number), in turn. With a block pool first, prefill and decode are kept apart."""
    return {worker: gpus[index % len(gpus)] for index, worker in enumerate(workers)} if gpus else {}


def shortage(workers: int, gpus: int) -> str:
    """A sentence about more workers than GPUs; empty if each has its own, or without GPUs (all run on the CPU)."""
    if not gpus or workers <= gpus:
        return ""
    return f"{workers} workers and {gpus} visible GPU{'s' * (gpus > 1)}: workers share GPUs and their memory"
