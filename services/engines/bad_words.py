"""Which tokens would complete a sequence of ids that an answer must not have."""

import copy
from collections.abc import Mapping, Sequence


class BadWords:
    """The sequences that must not be generated, and the end of the answer so far. Never changed: `after` makes another.

    The last id of a sequence is banned while the answer ends with the others. The prompt does not count. No sequence
    is empty.
    """

    __slots__ = ("_last_ids", "_lengths", "_tail")

    def __init__(self, sequences: Sequence[tuple[int, ...]], answer: Sequence[int]) -> None:
        last_ids: dict[tuple[int, ...], set[int]] = {}
        for sequence in sequences:
            last_ids.setdefault(sequence[:-1], set()).add(sequence[-1])
        self._last_ids: Mapping[tuple[int, ...], set[int]] = last_ids
        self._lengths = sorted({len(start) for start in last_ids})
        self._tail = self._end_of(answer)

    def after(self, tokens: Sequence[int]) -> "BadWords":
        """The same sequences, after these tokens more."""
        later = copy.copy(self)
        later._tail = self._end_of((*self._tail, *tokens))
        return later

    def banned(self) -> set[int]:
        """The tokens that must not come next."""
        tail = self._tail
        ends = (tail[len(tail) - length :] for length in self._lengths if length <= len(tail))
        return {token for end in ends for token in self._last_ids.get(end, ())}

    def _end_of(self, answer: Sequence[int]) -> tuple[int, ...]:
        return tuple(answer[max(0, len(answer) - self._lengths[-1]) :])
