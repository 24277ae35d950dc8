"""The output of one request: ids to text, stop conditions, and why it ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.v1 import prompt_pb2
from baton.errors import InvalidReply
from baton.inference.v1 import generate_pb2, sampling_pb2
from router.text.parsing.registry import AnswerParser
from router.text.served_model import ServedModel
from router.text.stop_strings import Stopped, StopStrings

# Finish reasons that the last token has caused.
_BY_TOKEN = (sampling_pb2.FINISH_REASON_END_OF_SEQUENCE, sampling_pb2.FINISH_REASON_STOP_TOKEN)


@dataclass(slots=True)  # not frozen: each message has one, and freezing takes a call for each field
class TokenDelta:
    """The addition of new ids to the output."""

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[sampling_pb2.TokenLogprob] = ()
    reasoning: str = ""
    tool_calls: Sequence[generate_pb2.ToolCall] = ()
    prompt_logprobs: generate_pb2.PromptLogprobs | None = None
    call_deltas: Sequence[generate_pb2.ToolCallDelta] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The reason for the output's end, and the stop string or token that ended it."""

    reason: sampling_pb2.FinishReason.ValueType
    stop_string: str = ""
    stop_token_id: int | None = None
    is_by_call: bool = False  # whether its only tool call has ended it

    @property
    def is_unknown_to_worker(self) -> bool:
        """True if only the router knows that the answer has ended, and the worker goes on."""
        return self.is_by_call or bool(self.stop_string)


class Completion:
    """A growing output. Its state (stop strings, incomplete characters) survives changes of workers.

    `ending_ids` are those that end it; none does before it is `max_tokens` long. It takes no token after its end, and
    none that is not in the model's vocabulary, whatever workers send.
    """

    def __init__(
        self,
        request: generate_pb2.GenerateRequest,
        sampling: prompt_pb2.Sampling,
        model: ServedModel,
        parser: AnswerParser | None = None,
    ) -> None:
        keep_special = request.response.keep_special_tokens
        tokenizer = model.tokenizer
        self.sampling = sampling
        self._parser = parser
        markers = parser.markers if parser else ()
        self._detokenizer = tokenizer.detokenizer(keep_special, markers) if tokenizer else None
        self._special = tokenizer.is_special if tokenizer and keep_special else None
        self._include_stop = request.stopping.include_stop
        stop = request.stopping.stop
        self._stop_strings = StopStrings(stop, self._include_stop) if stop else None
        self._is_guided = sampling.HasField("guided")
        self._stop_ids = frozenset(sampling.stop.stop_token_ids)
        ignores_eos = sampling.stop.ignore_eos and not self._is_guided
        self._eos_ids = frozenset() if ignores_eos else model.eos_token_ids
        # Mostly the model's own set: one that many requests share stays in the processor's caches.
        self.ending_ids = self._stop_ids | self._eos_ids if self._stop_ids else self._eos_ids
        self._min_tokens, self.max_tokens = sampling.stop.min_tokens, sampling.stop.max_tokens
        # A card may not say how many tokens there are.
        self._vocab_size = model.limits.vocab_size or 2**32
        self._has_logprobs = sampling.HasField("logprobs")
        self.finished: Finish | None = None  # why it ended; None while it grows
        self.has_overrun = False  # whether ids came beyond its end, together with those before it
        self.token_ids: list[int] = []

    def push(self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprob]) -> TokenDelta:
        """Adds ids, and returns what can be sent. Finishes the completion if a stop condition is met.

        Of ids beyond its end none is added. Raises InvalidReply, and adds nothing, if it has ended before or if the ids
        or their log probabilities are not those of an answer.
        """
        count = len(token_ids)
        largest = token_ids[0] if count == 1 else max(token_ids, default=0)
        if self.finished is not None or self._has_logprobs or largest >= self._vocab_size:
            self._check(token_ids, logprobs)
        elif logprobs:
            logprobs = ()
        if count > 1:
            kept = self._count_kept(token_ids)
            if kept < count:
                self.has_overrun = True
                token_ids, logprobs = token_ids[:kept], logprobs[:kept]
        if self._stop_strings is None:
            return self._delta(self._push(token_ids), token_ids, logprobs)
        # A stop string ends the output at a token: the tokens after it must not count.
        text, added = self._push_without_stop(token_ids[:-1]) if len(token_ids) > 2 else ("", 0)
        for count, token_id in enumerate(token_ids[added:], start=added + 1):
            text += self._push((token_id,))
            if self.finished:
                return self._delta(text, token_ids[:count], logprobs[:count])
        return self._delta(text, token_ids, logprobs)

    def _push_without_stop(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Adds ids none of which ends the sequence together, if no stop string is complete in their text.

        Returns what can be sent, and how many were added: all or none.
        """
        assert self._stop_strings is not None
        text = self._detokenizer.whole_text(token_ids) if self._detokenizer else None
        if not text or self._stop_strings.would_stop(text):
            return "", 0
        self.token_ids += token_ids
        released = self._stop_strings.push(text, may_stop=False)
        assert isinstance(released, str)
        return released, len(token_ids)

    @property
    def takes_single_tokens(self) -> bool:
        """True if `push_token` may be called: the output is plain text, without tool calls or reasoning."""
        return self._parser is None

    @property
    def is_plain(self) -> bool:
        """True if the next token of `serialized` that ends nothing can be added to `token_ids` without `push_token`."""
        is_open = self._stop_strings is None and self.finished is None
        return is_open and self._detokenizer is not None and self._detokenizer.is_whole

    @property
    def serialized(self) -> dict[int, bytes]:
        """Of the vocabulary's tokens that are whole characters: their ids and texts as messages have them."""
        texts = self._detokenizer.texts if self._detokenizer else None
        return {} if texts is None else texts.serialized

    def push_token(self, token_id: int) -> str:
        """Adds one id, without its log probability, and returns the text that can be sent. Otherwise as `push`."""
        ids = self.token_ids
        if self.finished is not None or token_id >= self._vocab_size:
            self._check((token_id,), ())
        if self._stop_strings is not None or token_id in self.ending_ids or len(ids) + 1 >= self.max_tokens:
            return self._push((token_id,))
        ids.append(token_id)
        return self._detokenizer.push_one(token_id) if self._detokenizer else ""

    def _check(self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprob]) -> None:
        """Raises InvalidReply for ids that `push` does not add."""
        if not token_ids:
            return
        if self.finished is not None:
            raise InvalidReply(f"{len(token_ids)} tokens came after the end of the answer")
        if max(token_ids) >= self._vocab_size:
            raise InvalidReply(f"token {max(token_ids)} is not in the vocabulary of {self._vocab_size}")
        if not self._has_logprobs:
            return
        are_theirs = len(logprobs) == len(token_ids) and all(
            one.token_id == token_id and one.logprob == one.logprob  # not NaN
            for one, token_id in zip(logprobs, token_ids, strict=True)
        )
        if not are_theirs:
            raise InvalidReply(f"{len(logprobs)} log probabilities do not match {len(token_ids)} tokens")

    def _count_kept(self, token_ids: Sequence[int]) -> int:
        """The number of these ids, at least two, that the answer has until its end."""
        kept = min(len(token_ids), self.max_tokens - len(self.token_ids))
        if self.ending_ids.isdisjoint(token_ids):
            return kept
        for count, token_id in enumerate(token_ids[:kept], start=1):
            may_stop = len(self.token_ids) + count >= self._min_tokens
            if token_id in self.ending_ids and (may_stop or (self._is_guided and token_id in self._eos_ids)):
                return count
        return kept

    def finish(self, reason: sampling_pb2.FinishReason.ValueType, stop_string: str = "") -> Finish:
        """Ends the completion. Returns the first finish: later ones change nothing."""
        if self.finished is None:
            stop_token_id = self.token_ids[-1] if reason in _BY_TOKEN and self.token_ids else None
            self.finished = Finish(reason, stop_string, stop_token_id)
        return self.finished

    def flush(self) -> TokenDelta:
        """The text that was held back, once the completion has finished."""
        last = self._delta(self._held_back_text())
        if self._parser is None:
            return last
        rest = self._parser.flush()
        calls, deltas = [*last.tool_calls, *rest.tool_calls], [*last.call_deltas, *rest.call_deltas]
        reasoning = last.reasoning + rest.reasoning
        return TokenDelta(last.text + rest.text, (), (), reasoning, calls, call_deltas=deltas)

    def _delta(
        self, text: str, token_ids: Sequence[int] = (), logprobs: Sequence[sampling_pb2.TokenLogprob] = ()
    ) -> TokenDelta:
        if self._parser is None:
            return TokenDelta(text, token_ids, logprobs)
        parsed = self._parser.push(text)
        if self._parser.has_ended and self.finished is None:
            self.finished = Finish(sampling_pb2.FINISH_REASON_END_OF_SEQUENCE, is_by_call=True)
        parts = (parsed.reasoning, parsed.tool_calls)
        return TokenDelta(parsed.text, token_ids, logprobs, *parts, call_deltas=parsed.call_deltas)

    def _held_back_text(self) -> str:
        is_cut = self.finished is not None and self.finished.reason == sampling_pb2.FINISH_REASON_STOP_STRING
        if is_cut or self._detokenizer is None:
            return ""
        tail = self._detokenizer.flush()
        if self._stop_strings is None:
            return tail
        released = self._stop_strings.push(tail, may_stop=False)
        assert isinstance(released, str)
        return released + self._stop_strings.flush()

    def _push(self, token_ids: Sequence[int]) -> str:
        self.token_ids += token_ids
        last, length = token_ids[-1] if token_ids else -1, len(self.token_ids)
        may_stop = length >= self._min_tokens
        # A grammar allows the end of the sequence only where the answer must or may end.
        is_end = last in self.ending_ids and (may_stop or (self._is_guided and last in self._eos_ids))
        reason = self._stop_reason(last) if is_end else None
        shown = token_ids[:-1] if reason and not self._is_shown(last) else token_ids
        text = self._detokenizer.push(shown) if self._detokenizer else ""
        if self._stop_strings is not None:
            released = self._stop_strings.push(text, may_stop)
            if isinstance(released, Stopped):
                self.finish(sampling_pb2.FINISH_REASON_STOP_STRING, released.stop_string)
                return released.text
            text = released
        if reason:
            self.finish(reason)
        elif length >= self.max_tokens:
            self.finish(sampling_pb2.FINISH_REASON_LENGTH)
        return text

    def _stop_reason(self, token_id: int) -> sampling_pb2.FinishReason.ValueType | None:
        if token_id in self._stop_ids:
            return sampling_pb2.FINISH_REASON_STOP_TOKEN
        if token_id in self._eos_ids:
            return sampling_pb2.FINISH_REASON_END_OF_SEQUENCE
        return None

    def _is_shown(self, token_id: int) -> bool:
        """True if the token that ends the output is part of its text."""
        return self._include_stop or (self._special is not None and self._special(token_id))
