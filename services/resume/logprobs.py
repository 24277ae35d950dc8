"""The log probabilities of a kept decode: those of its last ids, and of its prompt until they are read."""

from collections import deque

from typing_extensions import Self

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import generate_pb2, sampling_pb2
from services.engines.answer import Tokens
from services.requests.prompts import logprob_message, prompt_logprobs_message


class KeptLogprobs:
    """The log probabilities of one kept decode, of whose ids the first may have none here any more.

    `of_tokens` and `of_prompt` say which its request has asked for; `prompt` has the latter.
    """

    def __init__(self, *, of_tokens: bool, of_prompt: bool, most_bytes: int) -> None:
        self.of_tokens, self.of_prompt = of_tokens, of_prompt
        self.prompt: generate_pb2.PromptLogprobs | None = None
        self._last: deque[bytes] = deque()  # serialized
        self._bytes, self._most_bytes = 0, most_bytes

    @classmethod
    def of(cls, sampling: prompt_pb2.Sampling, most_bytes: int) -> Self | None:
        """Those of a request; None if a token is no more than its id."""
        of_tokens, of_prompt = sampling.HasField("logprobs"), sampling.HasField("prompt_logprobs")
        if not (of_tokens or of_prompt):
            return None
        return cls(of_tokens=of_tokens, of_prompt=of_prompt, most_bytes=most_bytes)

    @property
    def size(self) -> int:
        """Their bytes."""
        return self._bytes + (self.prompt.ByteSize() if self.prompt is not None else 0)

    def add(self, tokens: Tokens, *, is_read: bool) -> None:
        """Takes those of tokens."""
        if tokens.prompt_logprobs is not None:
            self.prompt = prompt_logprobs_message(tokens.prompt_logprobs)
        for each in tokens.logprobs:
            self._last.append(logprob_message(each).SerializeToString())
            self._bytes += len(self._last[-1])
            # While it is read, what the reader has not got stays: its own bound is that of a slow reader.
            while self._bytes > self._most_bytes and not is_read and len(self._last) > 1:
                self._bytes -= len(self._last.popleft())

    def last(self, number: int) -> list[sampling_pb2.TokenLogprob] | None:
        """Those of the last ids, of so many; None if they are not here any more."""
        first = len(self._last) - number
        if first < 0:
            return None
        return [sampling_pb2.TokenLogprob.FromString(self._last[at]) for at in range(first, len(self._last))]

    def forget_before(self, number: int) -> None:
        """Drops what is over the bound of all but the last ids, of so many."""
        while self._bytes > self._most_bytes and len(self._last) > number:
            self._bytes -= len(self._last.popleft())
