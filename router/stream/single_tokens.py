"""The tokens of a stream that runs: each is turned into text and sent as it comes, without a coroutine."""

import time
from collections.abc import Callable
from typing import Protocol

from baton.inference.v1 import generate_pb2
from router.routing.latency import DecodeTimer
from router.stream.reply import SendNow
from router.telemetry.request_metrics import TokenLatencies
from router.telemetry.stats import RequestStats
from router.text.completion import Completion
from rpc.multiplex.tokens import TokenOutput


class SingleTokens:
    """Sends messages of one token each, at once, while `is_flowing`: the client reads, and nothing waits before them.

    `sequence` is the next message's number, of all messages of the request. The message is used again for each token,
    and its parts are kept: finding one takes as long as setting it.
    """

    def __init__(self, request_id: str, send_now: SendNow | None) -> None:
        self.sequence = 0
        self.is_flowing = False
        self.client_reads = True
        self._send_now = send_now
        self._message = generate_pb2.GenerateResponse(request_id=request_id)
        self._delta = self._message.token
        self._token_ids = self._delta.token_ids
        self._token_ids.append(0)

    def send(self, text: str, token_id: int) -> None:
        """Sends a token without its log probability; only while tokens flow."""
        assert self._send_now is not None
        self._delta.text = text
        self._token_ids[0] = token_id
        self._message.sequence = self.sequence
        self.sequence += 1
        if not self._send_now(self._message):
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

    `timed` notes a token that took so many nanoseconds, and returns its latency in seconds. `stop` ends the call, at a
    stop string.
    """

    def __init__(
        self,
        writer: TokenWriter,
        completion: Completion,
        timer: DecodeTimer,
        stats: RequestStats,
        latencies: TokenLatencies,
        timed: Callable[[int], float],
        stop: Callable[[], None],
    ) -> None:
        self.output = writer.output
        self._writer = writer
        self._single = writer.single
        self._completion = completion
        self._timer = timer
        self._stats = stats
        self._latencies = latencies
        self._timed = timed
        self._stop = stop
        self._spent = 0  # nanoseconds, on the text of tokens that are not noted yet

    def take(self, token_id: int) -> bool:
        """Takes one token, and sends it, at once; not the first ones of a call. False if the client is behind."""
        single, completion = self._single, self._completion
        if not single.is_flowing and not self._writer.has_room:
            return False
        started = time.perf_counter_ns()
        text = completion.push_token(token_id)
        self._spent += time.perf_counter_ns() - started
        if single.is_flowing:
            single.send(text, token_id)
        else:
            self._writer.put_token(text, token_id)
        finish = completion.finished
        if finish is not None and finish.stop_string:
            self._stop()
        return True

    def note_taken(self) -> None:
        """Times and counts a token that was sent."""
        self._timer.took_token()
        self._stats.completion_tokens = len(self._completion.token_ids)
        spent, self._spent = self._spent, 0
        self._latencies.observe(self._timed(spent), 1)
