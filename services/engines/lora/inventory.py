"""LoRA adapters of an engine: what it has, and how requests use them."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from services.engines.prompt import Lora


@dataclass(frozen=True, slots=True)
class RankedLora:
    """An adapter, and the largest rank of its matrices."""

    lora: Lora
    rank: int


@dataclass(frozen=True, slots=True)
class LoraRejection:
    """An adapter of the folder that cannot be served; `reason` names the key or the weight."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoraInventory:
    """`loaded` adapters are in memory; `available` ones are loaded when a request uses them. Both sorted by name."""

    loaded: Sequence[RankedLora] = ()
    available: Sequence[RankedLora] = ()
    rejected: Sequence[LoraRejection] = ()
    max_loaded: int = 0


class ServesLoras(Protocol):
    """The adapters of an engine. Used in the event loop."""

    def inventory(self) -> LoraInventory:
        """Cheap: what is known now, without reading the folder."""

    def require(self, lora: Lora) -> None:
        """Raises LoraNotHere unless `use` could succeed."""

    def use(self, lora: Lora) -> AbstractAsyncContextManager[None]:
        """Keeps an adapter in memory while the context is open; entering it may load the adapter.

        Raises LoraNotHere, and Overloaded if all places for adapters are in use. Cancelling the wait leaves a load
        that has begun to its end, for other requests.
        """

    async def refresh(self) -> None:
        """Reads the folder again."""

    async def load(self, name: str) -> None:
        """Reads the folder again, and loads an adapter; one of the same name and other content is replaced.

        Requests that run keep the old one. Raises InvalidRequest for an unknown or unsupported adapter, and Overloaded.
        """

    async def unload(self, name: str) -> None:
        """Refuses the adapter from now on, and returns when nothing uses it any more; then its memory is free.

        It is not loaded again until `load`. Raises InvalidRequest if it is neither loaded nor available.
        """
