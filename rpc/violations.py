"""Collects all wrong fields of a request, so that its sender can fix them at once."""

import math
from collections.abc import Callable, Sequence
from itertools import chain

from baton.errors import FieldViolation, InvalidRequest
from runtime.threads import in_pieces

_MAX_VIOLATIONS = 20  # of a million wrong ids, the first few are enough
_LONGEST_REQUEST_ID = 128


def renamed(error: InvalidRequest, rename: Callable[[FieldViolation], FieldViolation]) -> InvalidRequest:
    """The same error, whose fields are those of another request."""
    return InvalidRequest([rename(one) for one in error.violations], stage=error.stage, worker_id=error.worker_id)


def is_request_id(value: str) -> bool:
    """True if logs and traces can show a request id as it is."""
    return len(value) <= _LONGEST_REQUEST_ID and value.isprintable()


class Violations:
    """The wrong fields found so far."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def add(self, field: str, description: str) -> None:
        """Adds a wrong field, by its path in the request."""
        if len(self._found) < _MAX_VIOLATIONS:
            self._found.append(FieldViolation(field, description))

    def require(self, holds: bool, field: str, description: str) -> None:
        """Adds the field unless `holds`."""
        if not holds:
            self.add(field, description)

    def number(self, field: str, value: float, low: float, high: float = math.inf) -> None:
        """Adds a number that is not finite, or outside [low, high]."""
        if math.isnan(value) or not low <= value <= high:
            bounds = f"must be in [{low:g}, {high:g}]" if high < math.inf else f"must be at least {low:g}"
            self.add(field, f"{bounds}, is {value:g}")
        elif math.isinf(value):
            self.add(field, f"must be finite, is {value:g}")

    @property
    def is_full(self) -> bool:
        """True if further violations are ignored, so that checking can stop."""
        return len(self._found) >= _MAX_VIOLATIONS

    def count(self, field: str, number: int, most: int) -> bool:
        """True if there are at most `most` of something; adds the field if not."""
        if number <= most:
            return True
        self.add(field, f"has {number} of at most {most}")
        return False

    def request_id(self, value: str) -> None:
        """Adds a request id that logs and traces could not show as it is."""
        if not is_request_id(value):
            self.add("request_id", f"must be at most {_LONGEST_REQUEST_ID} printable characters")

    def token_ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        """Adds each id that the vocabulary does not have. The length of the list must be bounded."""
        # Slices of a message's field are lists, which are faster to iterate.
        if all(max(piece) < vocab_size for piece in in_pieces(ids)):
            return
        for index, token_id in enumerate(chain.from_iterable(in_pieces(ids))):
            if token_id >= vocab_size:
                self.add(f"{field}[{index}]", f"the vocabulary ends at {vocab_size - 1}")
                if self.is_full:
                    return

    def raise_any(self) -> None:
        """Raises InvalidRequest with all violations, if there are any."""
        if self._found:
            raise InvalidRequest(self._found)
