"""What engines offer that move KV from one to another themselves."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from services.answer import Finished, Tokens
from services.kv import HeldKv
from services.prompt import Prompt, Sampling


@runtime_checkable
class MovingKv(HeldKv, Protocol):
    """Held KV that engines move themselves: no blocks of a pool, but a state that the other side's engine reads."""

    @property
    def engine_state(self) -> bytes: ...

    def fetched(self) -> None:
        """The other side has all of it: `release` then has nothing to call off. Called at most once, before it."""


@dataclass(frozen=True, slots=True)
class HandedKv:
    """A prompt whose KV an engine is to fetch by itself. `prompt.emitted` is at least the handoff's first token.

    `state` came off the wire; `num_tokens` is how many tokens of the context the KV is of.
    """

    prompt: Prompt
    num_tokens: int
    state: bytes = field(repr=False)


@runtime_checkable
class MovesKv(Protocol):
    """An engine that fetches KV from another one itself, and holds KV as MovingKv."""

    @property
    def fetch_seconds(self) -> float:
        """For how long after a prefill somebody may still be reading its KV; memory must not go before that."""

    async def take_over(self, source: HandedKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        """Returns once the KV is here; then it is as after `decode`.

        Raises InvalidRequest for a state that cannot be right, LayoutMismatch for one of another version, Overloaded
        before anything was fetched, and HandoffLost if the KV does not come.
        """
