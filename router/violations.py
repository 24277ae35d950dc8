"""Collects everything that is wrong with a request, so that its sender mends it in one go."""

import math
from collections.abc import Sequence

from rpc.errors import FieldViolation, InvalidRequest

_MOST = 20  # a request of a million wrong ids is told about the first few


class Violations:
    """The wrong fields found so far."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def add(self, field: str, description: str) -> None:
        """Notes a wrong field, by its path in the request."""
        if len(self._found) < _MOST:
            self._found.append(FieldViolation(field, description))

    def require(self, holds: bool, field: str, description: str) -> None:
        """Notes the field unless `holds`."""
        if not holds:
            self.add(field, description)

    def number(self, field: str, value: float, low: float, high: float = math.inf) -> None:
        """Notes a number that is outside [low, high], or none."""
        if math.isnan(value) or not low <= value <= high:
            bounds = f"must be in [{low:g}, {high:g}]" if high < math.inf else f"must be at least {low:g}"
            self.add(field, f"{bounds}, is {value:g}")
        elif math.isinf(value):
            self.add(field, f"must be finite, is {value:g}")

    def token_ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        """Notes each id that the vocabulary does not have."""
        if not ids or max(ids) < vocab_size:
            return
        for index, token_id in enumerate(ids):
            self.require(token_id < vocab_size, f"{field}[{index}]", f"the vocabulary ends at {vocab_size - 1}")

    def raise_any(self) -> None:
        """Raises InvalidRequest with all of them, if there are any."""
        if self._found:
            raise InvalidRequest(self._found)
