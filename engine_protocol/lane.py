"""The lane of tokens, from an engine's step to a client's socket: three contracts, each with one direction.

A `TokenSource` is pulled: a worker's generation. A `TokenSink` is pushed, and its meter counts: what a router does with
the tokens of one call. A `Wire` (baton_http2/server/reply.py) is written and flushed: a client's stream.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

from baton_http2.server.reply import Source, Wire

TokenSource: TypeAlias = Source[int]


class SinkMeter(Protocol):
    """The counter of a sink's tokens."""

    def count(self, now: float) -> None:
        """Counts and times one that was pushed. Raises nothing; `now` is in seconds of time.monotonic."""


class TokenSink(Protocol):
    """Where the tokens of one call go as they come."""

    @property
    def wire(self) -> Wire | None:
        """The wire that the tokens are written to. Those of one connection are pushed together, and flushed then."""

    @property
    def meter(self) -> SinkMeter:
        """The counter of the tokens, used once those of all calls are written."""

    def push(self, token_id: int) -> bool:
        """Passes a token on; False to have it read by the task that waits for the call's next response instead."""


# Sends what a source gives until its last ids. Raises what the source raises.
SendTokens: TypeAlias = Callable[[TokenSource], Awaitable[None]]


class TokenReply(Protocol):
    """The way back of a worker to the router that has called it, from `context.reply()`."""

    @property
    def write(self) -> Callable[[Any], Awaitable[None]]:
        """Sends a message; waits while the caller is behind."""

    async def write_from(self, source: TokenSource, message_of: Callable[[Sequence[int]], Any]) -> None:
        """Sends the tokens of a source until its last ones, as messages or in those that other calls share."""
