"""The lane of tokens, from an engine's step to a client's socket: three contracts, each with one direction.

A `TokenSource` is pulled: a worker's generation. A `TokenSink` is pushed, and its meter counts: what a router does with
the tokens of one call. A `Wire` (baton_http2/server/reply.py) is written and flushed: a client's stream.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

from baton_http2.server.reply import Source, Wire

TokenSource: TypeAlias = Source[int]


class Latencies(Protocol):
    """The latencies of tokens of one kind: equal and hashed alike where they are counted in the same places."""

    def count(self, seconds: float, tokens: int, now: float) -> None:
        """Counts tokens that came now, and `seconds` after those before them. Raises nothing."""


class StepCounter:
    """Counts the tokens of each step of one stream together: of all meters that have joined, which have one in each.

    They have the same latency, so that no meter is looked at. `is_complete` says that no other meter counts a token by
    itself. Times are in seconds of time.monotonic.
    """

    def __init__(self) -> None:
        self._tokens: dict[Latencies, int] = {}
        self.counted_at = self.previous_at = 0.0  # the last step, and the one before it
        self.is_complete = False

    def join(self, latencies: Latencies) -> None:
        """Counts one token more in each step after this one."""
        self._tokens[latencies] = self._tokens.get(latencies, 0) + 1

    def leave(self, latencies: Latencies) -> None:
        """Counts one token less, also in the step that is being pushed."""
        self.is_complete = False
        self._tokens[latencies] -= 1
        if not self._tokens[latencies]:
            del self._tokens[latencies]

    def count(self, now: float) -> None:
        """Counts a step."""
        self.previous_at, self.counted_at = self.counted_at, now
        for latencies, tokens in self._tokens.items():
            latencies.count(now - self.previous_at, tokens, now)


class SinkMeter(Protocol):
    """The counter of a sink's tokens."""

    def count(self, now: float, steps: StepCounter | None) -> bool:
        """Counts and times a token that was pushed, unless `steps` has; whether `steps` counts the next ones.

        Raises nothing; `now` is in seconds of time.monotonic. Without `steps` nothing else counts them.
        """

    def leave(self) -> None:
        """Counts the next token by itself: the step has none that is pushed into the sink, or several."""


class TokenSink(Protocol):
    """The receiver of one call's tokens, as they come."""

    @property
    def wire(self) -> Wire | None:
        """The wire that the tokens are written to. Those of one connection are pushed together, and flushed then."""

    @property
    def meter(self) -> SinkMeter:
        """The counter of the tokens, used once those of all calls are written."""

    def push(self, token_id: int) -> bool:
        """Passes a token on; False to have it read by the task that waits for the call's next response instead."""


# Sends what a source gives until its last ids. Returns how many they were. Raises what the source raises.
SendTokens: TypeAlias = Callable[[TokenSource], Awaitable[int]]


class TokenReply(Protocol):
    """The way back of a worker to the router that has called it, from `context.reply()`."""

    @property
    def write(self) -> Callable[[Any], Awaitable[None]]:
        """Sends a message; waits while the caller is behind."""

    async def write_from(self, source: TokenSource, message_of: Callable[[Sequence[int]], Any]) -> int:
        """Sends the tokens of a source until its last ones, as messages or in those that other calls share.

        Returns how many they were.
        """
