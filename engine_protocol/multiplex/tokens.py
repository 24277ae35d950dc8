"""Tokens without a task's step for each: a servicer's source of them, and what takes them on the caller's side."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol


class TokenSource(Protocol):
    """Where the token ids of one call come from."""

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Begins, and calls `ready` on the event loop whenever `take` has something new; at once, if it has already."""

    def take(self) -> tuple[Sequence[int], bool]:
        """The ids since the last time, and whether they were the last. Raises what ended the source, if it failed."""


class TokenOutput(Protocol):
    """Where the tokens of several calls are written, such as a connection."""

    def flush_early(self) -> None:
        """Writes what was sent, though this turn of the event loop goes on."""


class TokenTaker(Protocol):
    """Takes the tokens of one call as they come. Those of one `output` are taken together, and it is flushed then."""

    @property
    def output(self) -> TokenOutput | None:
        """Where the tokens are written; None if it is not known."""

    def take(self, token_id: int) -> bool:
        """Takes a token; False to have it read by the task that waits for the next response instead."""

    def note_taken(self, now: float) -> None:
        """Does what can wait until the tokens of all calls are written. Called for each token that was taken.

        `now` is in seconds of time.monotonic.
        """


# Sends what a source gives until its last ids. Raises what the source raises.
Relay = Callable[[TokenSource], Awaitable[None]]


def relay_of(context: Any) -> Relay | None:
    """How tokens are sent at the least cost; None for a call that has a stream of its own."""
    relay: Relay | None = getattr(context, "relay_tokens", None)
    return relay
