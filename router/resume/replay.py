"""An answer of which the first ids are known: what its text was, without the part that its client has.

The whole text of an answer follows from its ids, however they come. What of it was released after a number of ids does
not: it depends on which of them came together. So a client's position has both, and what it has beyond the text that is
released here is cut from what is released later.
"""

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.v1 import prompt_pb2
from baton.errors import FieldViolation, InvalidReply, PositionInvalid
from baton.inference.v1 import generate_pb2, sampling_pb2
from router.text.completion import Completion, TokenDelta
from router.text.parsing.registry import AnswerParser
from router.text.served_model import ServedModel


class ReplayedCompletion(Completion):
    """A Completion whose client has a part of it already. `missing` is what it lacks of the ids that are known.

    `known` are all ids so far, of which `have` tells how many the client has; `logprobs` are of the others. Raises
    PositionInvalid if they are no part of an answer.
    """

    def __init__(
        self,
        request: generate_pb2.GenerateRequest,
        sampling: prompt_pb2.Sampling,
        model: ServedModel,
        parser: AnswerParser | None,
        have: generate_pb2.AnswerPosition,
    ) -> None:
        super().__init__(request, sampling, model, parser)
        self._have_tokens = have.tokens
        self._text_left = have.text_bytes
        self._reasoning_left = have.reasoning_bytes
        self._calls_left = have.tool_calls
        self.missing = TokenDelta("")

    def replay(self, known: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprob] = ()) -> None:
        """Adds the ids that are known, once, before any other."""
        if len(known) < self._have_tokens:
            text = f"the client has {self._have_tokens} tokens, of which {len(known)} are known"
            raise PositionInvalid([FieldViolation("have", text)])
        try:
            had = self._replay_had(known[: self._have_tokens])
            rest = known[self._have_tokens :]
            new = self.push(rest, logprobs) if rest and self.finished is None else TokenDelta("")
        except InvalidReply as error:
            raise PositionInvalid([FieldViolation("received", error.message)]) from error
        calls = [*had.tool_calls, *new.tool_calls]
        self.missing = TokenDelta(
            had.text + new.text, new.token_ids, new.logprobs, had.reasoning + new.reasoning, calls
        )

    @property
    def is_plain(self) -> bool:
        """Plain as of Completion, but text that the client has is cut, which plain tokens are not."""
        return not self._text_left and super().is_plain

    def push(self, token_ids: Sequence[int], logprobs: Sequence[sampling_pb2.TokenLogprob]) -> TokenDelta:
        return self._cut(super().push(token_ids, logprobs))

    def push_token(self, token_id: int) -> str:
        text = super().push_token(token_id)
        return self._cut_text(text) if self._text_left else text

    def flush(self) -> TokenDelta:
        """The text that was held back. Raises PositionInvalid if the client claims more than the whole answer."""
        last = self._cut(super().flush())
        left = {"text_bytes": self._text_left, "reasoning_bytes": self._reasoning_left, "tool_calls": self._calls_left}
        beyond = [
            FieldViolation(f"have.{name}", f"is {more} more than the answer has") for name, more in left.items() if more
        ]
        if beyond:
            raise PositionInvalid(beyond)
        return last

    def _replay_had(self, ids: Sequence[int]) -> TokenDelta:
        """Those that the client has, with their log probabilities, which are not known here."""
        if not ids:
            return TokenDelta("")
        has_logprobs, self._has_logprobs = self._has_logprobs, False
        try:
            delta = self.push(ids, ())
        finally:
            self._has_logprobs = has_logprobs
        return replace(delta, token_ids=(), logprobs=())

    def _cut(self, delta: TokenDelta) -> TokenDelta:
        if not (self._text_left or self._reasoning_left or self._calls_left):
            return delta
        text, self._text_left = _without(delta.text, self._text_left)
        reasoning, self._reasoning_left = _without(delta.reasoning, self._reasoning_left)
        calls = delta.tool_calls[self._calls_left :]
        self._calls_left -= min(self._calls_left, len(delta.tool_calls))
        return replace(delta, text=text, reasoning=reasoning, tool_calls=calls)

    def _cut_text(self, text: str) -> str:
        kept, self._text_left = _without(text, self._text_left)
        return kept


def _without(text: str, num_bytes: int) -> tuple[str, int]:
    """The text without its first bytes in UTF-8, and how many are still to be cut from what follows.

    Raises PositionInvalid for a cut within a character.
    """
    if not num_bytes:
        return text, 0
    whole = text.encode()
    if num_bytes >= len(whole):
        return "", num_bytes - len(whole)
    try:
        return whole[num_bytes:].decode(), 0
    except UnicodeDecodeError:
        raise PositionInvalid([FieldViolation("have", "ends within a character of the answer")]) from None
