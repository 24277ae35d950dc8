"""The unsent part of an answer, the message that it becomes, with all that comes with its tokens, and their pace."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton.inference.v1 import generate_pb2, sampling_pb2
from router.text.completion import TokenDelta

# Fills the last message, just before it is sent, since it includes the time that the others took.
FillFinished = Callable[[generate_pb2.Finished], None]

_DEFAULT_DELAY_SECONDS = 0.2  # of tokens that wait for others


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of messages: the first token is sent at once, later ones `min_tokens` together.

    Fewer are sent when `max_delay_seconds` have passed since the first of them, and at the end.
    """

    min_tokens: int = 1
    max_delay_seconds: float = 0.0

    @classmethod
    def of(cls, response: generate_pb2.ResponseOptions) -> "Pace":
        """The pace that a request asks for."""
        if response.min_tokens_per_message <= 1:
            return AT_ONCE
        delay = response.max_delay
        seconds = delay.seconds + delay.nanos / 1e9 if response.HasField("max_delay") else _DEFAULT_DELAY_SECONDS
        return cls(response.min_tokens_per_message, seconds)


AT_ONCE = Pace()


class UnsentAnswer:
    """The unsent part of an answer. Everything that waits becomes one message, once `pace` says that it is due.

    `became_due` is called when tokens have waited for the pace's longest delay, `first_token_sent` when the first token
    leaves.
    """

    __slots__ = (
        "_became_due",
        "_delay",
        "_due_tokens",
        "_fill_finished",
        "_first_token_sent",
        "_is_due",
        "_logprobs",
        "_max_delay_seconds",
        "_parsed",
        "_started",
        "_text",
        "_token_ids",
    )

    def __init__(
        self, pace: Pace, max_tokens: int, became_due: Callable[[], None], first_token_sent: Callable[[], None]
    ) -> None:
        self._became_due = became_due
        self._first_token_sent: Callable[[], None] | None = first_token_sent
        self._due_tokens = min(pace.min_tokens, max_tokens)
        self._max_delay_seconds = pace.max_delay_seconds
        self._is_due = True
        self._delay: asyncio.TimerHandle | None = None
        self._started: generate_pb2.Started | generate_pb2.Resumed | None = None
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[sampling_pb2.TokenLogprob] = []
        self._parsed = _ParsedParts()
        self._fill_finished: FillFinished | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens that wait."""
        return len(self._token_ids)

    @property
    def is_empty(self) -> bool:
        """True if nothing waits."""
        waits = self._started or self._token_ids or self._text or self._fill_finished
        return not (waits or self._parsed.has_any)

    @property
    def sends_at_once(self) -> bool:
        """True if the next token becomes a message of its own, as it comes."""
        return self._first_token_sent is None and self._due_tokens <= 1 and self.is_empty

    # What waits.

    def start(self, started: generate_pb2.Started | generate_pb2.Resumed) -> None:
        """Adds the first message."""
        self._started = started

    def add(self, delta: TokenDelta) -> None:
        """Adds tokens."""
        self._text += delta.text
        self._token_ids += delta.token_ids
        if delta.logprobs:
            self._logprobs += delta.logprobs
        if delta.reasoning or delta.tool_calls or delta.call_deltas or delta.prompt_logprobs:
            self._parsed.add(delta)
        if not self._is_due:
            self._check_due()

    def finish(self, last: TokenDelta, fill_finished: FillFinished) -> None:
        """Adds what was held back until now, and the last message."""
        self.add(last)
        self._fill_finished = fill_finished
        self.set_due()

    def set_due(self) -> None:
        """Lets what waits be sent."""
        self._is_due = True
        if self._delay is not None:
            self._delay.cancel()
            self._delay = None

    def close(self) -> None:
        """Tells nothing more to what is called when it is due, which refers to this."""
        self._became_due = _nothing

    def _check_due(self) -> None:
        if len(self._token_ids) >= self._due_tokens:
            self.set_due()
        elif self._delay is None:
            self._delay = asyncio.get_running_loop().call_later(self._max_delay_seconds, self._delay_passed)

    def _delay_passed(self) -> None:
        self.set_due()
        self._became_due()

    # The next message.

    def move_to(self, message: generate_pb2.GenerateResponse, sequence: int) -> bool:
        """Makes `message`, which may have been sent before, the next one that is due; whether there is one."""
        if self._started is not None:
            if isinstance(self._started, generate_pb2.Started):
                message.started.CopyFrom(self._started)
            else:
                message.resumed.CopyFrom(self._started)
            self._started = None
        elif (self._token_ids or self._text or self._parsed.has_any) and self._is_due:
            self._move_tokens(message.token)
        elif self._fill_finished is not None:
            fill_finished, self._fill_finished = self._fill_finished, None
            # In place: each copy of a message with so many parts takes microseconds.
            message.finished.SetInParent()
            fill_finished(message.finished)
        else:
            return False
        message.sequence = sequence
        return True

    def _move_tokens(self, delta: generate_pb2.TokenDelta) -> None:
        delta.text = self._text
        delta.token_ids[:] = self._token_ids
        if self._logprobs:
            del delta.logprobs[:]
            delta.logprobs.extend(self._logprobs)
            self._logprobs = []
        elif delta.logprobs:
            del delta.logprobs[:]
        has_had = delta.reasoning or delta.tool_calls or delta.tool_call_deltas or delta.HasField("prompt_logprobs")
        if self._parsed.has_any or has_had:
            self._parsed.move_to(delta)
        self._text = ""
        self._token_ids.clear()
        self._is_due = self._due_tokens <= 1
        if self._first_token_sent is not None:
            self._first_token_sent()
            self._first_token_sent = None


def _nothing() -> None:
    """No callback."""


class _ParsedParts:
    """Reasoning, tool calls and the prompt's log probabilities that wait; most answers have none."""

    __slots__ = ("_call_deltas", "_prompt_logprobs", "_reasoning", "_tool_calls", "has_any")

    def __init__(self) -> None:
        self._reasoning = ""
        self._tool_calls: list[generate_pb2.ToolCall] = []
        self._call_deltas: list[generate_pb2.ToolCallDelta] = []
        self._prompt_logprobs: generate_pb2.PromptLogprobs | None = None
        self.has_any = False

    def add(self, delta: TokenDelta) -> None:
        """Adds those of new tokens."""
        self._reasoning += delta.reasoning
        self._tool_calls += delta.tool_calls
        self._call_deltas += delta.call_deltas
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self.has_any = bool(self._reasoning or self._tool_calls or self._call_deltas or self._prompt_logprobs)

    def move_to(self, delta: generate_pb2.TokenDelta) -> None:
        """Replaces those of a message, which may have been sent before."""
        delta.reasoning = self._reasoning
        del delta.tool_calls[:]
        delta.tool_calls.extend(self._tool_calls)
        del delta.tool_call_deltas[:]
        delta.tool_call_deltas.extend(self._call_deltas)
        delta.ClearField("prompt_logprobs")
        if self._prompt_logprobs is not None:
            delta.prompt_logprobs.CopyFrom(self._prompt_logprobs)
        self._reasoning, self._tool_calls, self._call_deltas, self._prompt_logprobs = "", [], [], None
        self.has_any = False
