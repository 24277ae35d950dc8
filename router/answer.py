"""What a request has generated so far: ids to text, stop conditions, usage."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.inference.v1 import generate_pb2, sampling_pb2

from router.admission import Job
from router.model import ServedModel
from router.stopping import Stopped, StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    """What newly generated ids add to the answer."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[sampling_pb2.TokenLogprob]


@dataclass(frozen=True, slots=True)
class End:
    """Why the answer is complete, and what completed it."""

    reason: sampling_pb2.FinishReason.ValueType
    stop_string: str = ""
    stop_token_id: int | None = None


class Answer:
    """A growing answer. It lives through changes of workers: penalties, stop strings and half characters go on.

    `end` is set as soon as the ids say that the answer is complete; what comes after them is dropped.
    """

    def __init__(self, request: generate_pb2.GenerateRequest, job: Job, model: ServedModel) -> None:
        stop = job.sampling.stop
        keep_special = request.response.keep_special_tokens
        tokenizer = model.tokenizer
        self._detokenizer = tokenizer.detokenizer(keep_special) if tokenizer else None
        self._special = tokenizer.is_special if tokenizer and keep_special else None
        self._stop_strings = StopStrings(request.stopping.stop, request.stopping.include_stop)
        self._is_split = bool(request.stopping.stop)
        self._include_stop = request.stopping.include_stop
        self._stop_ids = frozenset(stop.stop_token_ids)
        self._eos_ids = frozenset() if stop.ignore_eos else model.eos_token_ids
        self._min_tokens, self._max_tokens = stop.min_tokens, stop.max_tokens
        self.token_ids: list[int] = []
        self.end: End | None = None

    def push(self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprob]) -> Piece:
        """Adds ids, and returns what to send of them."""
        if not self._is_split:
            return Piece(self._push(token_ids), token_ids, logprobs)
        # A stop string ends the answer at a token: those after it must not count.
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            text += self._push((token_id,))
            if self.end:
                return Piece(text, token_ids[:count], logprobs[:count])
        return Piece(text, token_ids, logprobs)

    def close(self, end: End) -> str:
        """Ends the answer, and returns the text that was held back."""
        self.end = end
        if end.reason == sampling_pb2.FINISH_REASON_STOP_STRING or self._detokenizer is None:
            return ""
        tail = self._stop_strings.push(self._detokenizer.flush(), may_stop=False)
        assert isinstance(tail, str)
        return tail + self._stop_strings.flush()

    def ended_by(self, reason: sampling_pb2.FinishReason.ValueType) -> End:
        """The end that a worker reports, with the token that caused it."""
        by_token = reason in (sampling_pb2.FINISH_REASON_END_OF_SEQUENCE, sampling_pb2.FINISH_REASON_STOP_TOKEN)
        return End(reason, stop_token_id=self.token_ids[-1] if by_token and self.token_ids else None)

    def _push(self, token_ids: Sequence[int]) -> str:
        self.token_ids += token_ids
        last = token_ids[-1] if token_ids else -1
        may_stop = len(self.token_ids) >= self._min_tokens
        ends = self._end_at(last) if may_stop else None
        text = self._text(token_ids[:-1] if ends and not self._is_shown(last) else token_ids)
        released = self._stop_strings.push(text, may_stop)
        if isinstance(released, Stopped):
            self.end = End(sampling_pb2.FINISH_REASON_STOP_STRING, stop_string=released.stop_string)
            return released.text
        self.end = ends
        if ends is None and len(self.token_ids) >= self._max_tokens:
            self.end = End(sampling_pb2.FINISH_REASON_LENGTH)
        return released

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._detokenizer.push(token_ids) if self._detokenizer else ""

    def _end_at(self, token_id: int) -> End | None:
        if token_id in self._stop_ids:
            return End(sampling_pb2.FINISH_REASON_STOP_TOKEN, stop_token_id=token_id)
        if token_id in self._eos_ids:
            return End(sampling_pb2.FINISH_REASON_END_OF_SEQUENCE, stop_token_id=token_id)
        return None

    def _is_shown(self, token_id: int) -> bool:
        """Whether the token that ends the answer has a place in its text."""
        return self._include_stop or (self._special is not None and self._special(token_id))
