"""The Protocol of embedders, which turn texts into vectors."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy
from numpy.typing import NDArray

from services.engines.base import EnginePart

Vector: TypeAlias = NDArray[numpy.float32]


class TextEmbedder(EnginePart, Protocol):
    """An embedder, whose facts have `embedding`."""

    async def embed(self, inputs: Sequence[Sequence[int]]) -> Sequence[Vector]:
        """Returns a vector of `dimensions` numbers for each input, in order; not normalized.

        Each input has from 1 to `max_input_tokens` ids of the vocabulary. Cancelling drops the call if it waits.
        """
