"""Which GPU a worker of a local cluster gets."""

from collections.abc import Mapping, Sequence


def pinned(workers: Sequence[tuple[str, int]], gpus: Sequence[str]) -> Mapping[tuple[str, int], str]:
    """A GPU for each (role, number), by turns; those with a block pool first, so that prefill and decode are apart."""
    ordered = sorted(workers, key=lambda worker: worker[0] == "encode")
    return {worker: gpus[index % len(gpus)] for index, worker in enumerate(ordered)} if gpus else {}
