"""Prompt lookup: where the last tokens occurred before, the text may go on as it did then. It needs no second model.

See https://github.com/apoorvumang/prompt-lookup-decoding. Only the latest occurrence is looked up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# After so many rejected drafts in a row a sequence pauses drafting, for ever longer.
_MAX_MISSES = 3
_FIRST_PAUSE_TOKENS, _LONGEST_PAUSE_TOKENS = 8, 256


@dataclass(slots=True)
class DraftState:
    """Drafting's state of one sequence: the place after each n-gram, the success of its drafts, and its pauses."""

    drafted: int = 0
    accepted: int = 0
    _after: dict[tuple[int, ...], int] = field(default_factory=dict)
    _indexed: int = 0
    _misses: int = 0
    _pause: int = _FIRST_PAUSE_TOKENS
    _rests_until: int = 0

    def propose(self, tokens: Sequence[int], ngram: int, limit: int) -> tuple[int, ...]:
        """Returns at most `limit` tokens that may follow `tokens`, which may have grown since but not changed."""
        count = len(tokens)
        if limit <= 0 or count <= ngram or count < self._rests_until:
            return ()
        for end in range(max(self._indexed, ngram), count):
            self._after[tuple(tokens[end - ngram : end])] = end
        self._indexed = count
        start = self._after.get(tuple(tokens[count - ngram :]))
        if start is None:
            return ()
        # What is copied may reach into the copy itself: a short text that repeats.
        period = count - start
        return tuple(tokens[start + index % period] for index in range(limit))

    def record(self, accepted: int, num_tokens: int) -> None:
        """Notes the outcome of a draft. A sequence whose drafts fail repeatedly rests, each time twice as long."""
        if accepted:
            self._misses, self._pause = 0, _FIRST_PAUSE_TOKENS
            return
        self._misses += 1
        if self._misses >= _MAX_MISSES:
            self._misses, self._rests_until = 0, num_tokens + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_TOKENS)
