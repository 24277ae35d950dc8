"""How a servicer sends the tokens of one call: who writes the stream asks a source for them at each step."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol


class TokenSource(Protocol):
    """Where the token ids of one call come from."""

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Begins, and calls `ready` on the event loop whenever `take` has something new; at once, if it has already."""

    def take(self) -> tuple[Sequence[int], bool]:
        """The ids since the last time, and whether they were the last. Raises what ended the source, if it failed."""


# Sends what a source gives until its last ids. Raises what the source raises.
Relay = Callable[[TokenSource], Awaitable[None]]


def relay_of(context: Any) -> Relay | None:
    """How tokens are sent at the least cost; None for a call that has a stream of its own."""
    relay: Relay | None = getattr(context, "relay_tokens", None)
    return relay
