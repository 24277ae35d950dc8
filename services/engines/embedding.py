"""The Protocol of embedders, which turn texts into vectors."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy
from numpy.typing import NDArray

from services.engines.base import EncoderLoad, ModelFacts

Vector: TypeAlias = NDArray[numpy.float32]


class TextEmbedder(Protocol):
    """An embedder in one process. An async context manager: entering loads and warms up, leaving frees.

    Raises Overloaded when the bounded queue is full, and EngineFailed when computing fails. After a fatal error every
    call raises EngineFailed, and `healthy` is false.
    """

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model, with `embedding`."""

    @property
    def healthy(self) -> bool: ...

    @property
    def responsive(self) -> bool:
        """True while the engine answers (Engine)."""

    def load(self) -> EncoderLoad:
        """Cheap and safe to call from the event loop at any time."""

    async def embed(self, inputs: Sequence[Sequence[int]]) -> Sequence[Vector]:
        """Returns a vector of `dimensions` numbers for each input, in order; not normalized.

        Each input has from 1 to `max_input_tokens` ids of the vocabulary. Cancelling drops the call if it waits.
        """
