"""The data-parallel ranks of a worker: which one a request is to run on, and how busy each is with ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from router import policy

# How many requests busier than the idlest a session's own rank may be.
_SLACK = 2.0


class Ranks:
    """Counts what was sent to each. A worker of one rank is not told which: that is left to its engine."""

    def __init__(self, worker_id: str, count: int) -> None:
        self._worker_id = worker_id
        self._requests = [0] * max(1, count)
        self._turn = 0

    @contextmanager
    def taking(self, session_key: str) -> Iterator[int | None]:
        """The rank for a request, which counts as busy with it while the context is open."""
        if len(self._requests) == 1:
            yield None
            return
        self._turn += 1
        wish = policy.Wish(prompt_tokens=1, session_key=session_key, slack=_SLACK, turn=self._turn)
        rank = policy.pick_rank(self._worker_id, self._requests, wish)
        self._requests[rank] += 1
        try:
            yield rank
        finally:
            self._requests[rank] -= 1
