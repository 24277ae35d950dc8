"""The tokens of a stream that runs: each is turned into text and sent as it comes, without a coroutine."""

import time
from collections.abc import Callable
from typing import Protocol

from engine_protocol.multiplex.tokens import TokenOutput
from router.routing.latency import DecodeTimer
from router.stream.reply import WireWriter
from router.telemetry.request_metrics import Latencies, TokenLatencies
from router.telemetry.stats import RequestStats
from router.telemetry.timings import Timings
from router.text.completion import Completion
from router.text.token_messages import message_start, token_field, varint


class SingleTokens:
    """Sends messages of one token each, at once, while `is_flowing`: the client reads, and nothing waits before them.

    `sequence` is the next message's number, of all messages of the request.
    """

    __slots__ = ("_start", "_wire", "client_reads", "is_flowing", "sequence")

    def __init__(self, request_id: str, wire: WireWriter | None) -> None:
        self.sequence = 0
        self.is_flowing = False
        self.client_reads = True
        self._wire = wire
        self._start = message_start(request_id)

    @property
    def can_flow(self) -> bool:
        """Whether serialized messages can be sent at all."""
        return self._wire is not None

    def send(self, text: str, token_id: int) -> None:
        """Sends a token without its log probability; only while tokens flow."""
        self.send_field(token_field(text, token_id))

    def send_field(self, token: bytes) -> None:
        """Sends a token whose field is serialized; only while tokens flow."""
        sequence, wire = self.sequence, self._wire
        assert wire is not None
        self.sequence = sequence + 1
        if not wire.write(self._start + varint(sequence) + token) and not wire.can_take(0):
            self.is_flowing = self.client_reads = False


class TokenWriter(Protocol):
    """The writer of a request, as its single tokens know it."""

    single: SingleTokens
    output: TokenOutput | None

    @property
    def has_room(self) -> bool:
        """Whether the client is not too far behind."""

    def put_token(self, text: str, token_id: int) -> None:
        """Adds one token without its log probability."""


class TokenRelay:
    """Takes the tokens of one call to a worker as they come, and passes them to the client. See TokenTaker.

    A plain token, which is one or more whole characters and ends nothing, is sent as it was serialized once for its
    vocabulary, and touches few objects; all others go through the completion. `stop` ends the call, at a stop string;
    `ends` is called at the last token otherwise, after which the worker ends the call.
    The owner calls `settle` before it does anything else with the request.
    """

    __slots__ = (
        "_completion",
        "_ending_ids",
        "_ends",
        "_fields",
        "_ids",
        "_is_plain",
        "_last_plain",
        "_latencies",
        "_observed",
        "_plain_at",
        "_recent",
        "_single",
        "_stats",
        "_stop",
        "_timer",
        "_timings",
        "_took",
        "_writer",
        "output",
    )

    def __init__(
        self,
        writer: TokenWriter,
        completion: Completion,
        timer: DecodeTimer,
        stats: RequestStats,
        latencies: TokenLatencies,
        timings: Timings,
        stop: Callable[[], None],
        ends: Callable[[], None],
    ) -> None:
        self.output = writer.output
        self._is_plain = False  # whether the next token can be a plain one
        self._single = writer.single
        self._fields = completion.serialized
        self._ids = completion.token_ids
        # One that makes the completion this long, or longer, may end it.
        self._last_plain = completion.max_tokens - 1
        self._ending_ids = completion.ending_ids
        self._plain_at: float | None = None  # in seconds of time.monotonic, of the last plain token that is not settled
        self._recent = timer.recent_token_seconds
        self._latencies = latencies
        self._observed: Latencies | None = None  # what counts plain tokens
        self._writer = writer
        self._completion = completion
        self._timer = timer
        self._stats = stats
        self._timings = timings
        self._stop = stop
        self._ends = ends
        self._took = 0  # nanoseconds, on the text of a token that is not noted yet

    def take(self, token_id: int) -> bool:
        """Takes one token, and sends it, at once; not the first ones of a call. False if the client is behind."""
        if not self._is_plain:
            return self._take_any(token_id)
        field = self._fields.get(token_id)
        ids = self._ids
        if field is None or token_id in self._ending_ids or len(ids) >= self._last_plain:
            self.settle()
            return self._take_any(token_id)
        ids.append(token_id)
        single = self._single
        single.send_field(field)
        if not single.is_flowing:
            self._is_plain = False
        return True

    def _take_any(self, token_id: int) -> bool:
        single, completion = self._single, self._completion
        if not single.is_flowing and not self._writer.has_room:
            return False
        started = time.perf_counter_ns()
        text = completion.push_token(token_id)
        self._took += time.perf_counter_ns() - started
        if single.is_flowing:
            single.send(text, token_id)
        else:
            self._writer.put_token(text, token_id)
        finish = completion.finished
        if finish is not None:
            (self._stop if finish.stop_string else self._ends)()
        return True

    def note_taken(self, now: float) -> None:
        """Times and counts a token that was sent; `now` is in seconds of time.monotonic."""
        before = self._plain_at
        if before is not None:
            # A plain one after another.
            seconds = now - before
            self._plain_at = now
            self._recent.add(seconds, now)
            if self._observed is not None:
                self._observed.observe(seconds)
            return
        took, self._took = self._took, 0
        self._timer.took_token()
        self._stats.completion_tokens = len(self._ids)
        self._latencies.observe(self._timings.detokenized_for(took), 1)
        self._observed = self._latencies.single
        if self._single.is_flowing and self._completion.is_plain and self._observed is not None:
            self._is_plain, self._plain_at = True, now

    def settle(self) -> None:
        """Tells everything that counts and times tokens about the plain ones; the next one is not plain."""
        self._is_plain = False
        if self._plain_at is not None:
            ago, self._plain_at = time.monotonic() - self._plain_at, None
            self._stats.completion_tokens = len(self._ids)
            self._timer.has_waited(ago)
            self._timings.token_came(ago)
