"""Parts of messages: a message of one token that is used again, and what few answers have besides text."""

from baton.inference.v1 import generate_pb2
from router.text.completion import TokenDelta


class SingleToken:
    """A message of one token, used again for each. Its parts are kept: finding one takes as long as setting it."""

    def __init__(self, request_id: str) -> None:
        self._message = generate_pb2.GenerateResponse(request_id=request_id)
        self._delta = self._message.token
        self._token_ids = self._delta.token_ids
        self._token_ids.append(0)

    def fill(self, text: str, token_id: int, sequence: int) -> generate_pb2.GenerateResponse:
        """The message of the next token."""
        self._delta.text = text
        self._token_ids[0] = token_id
        self._message.sequence = sequence
        return self._message


class ParsedParts:
    """Reasoning, tool calls and the prompt's log probabilities that wait to be sent; most answers have none."""

    def __init__(self) -> None:
        self._reasoning = ""
        self._tool_calls: list[generate_pb2.ToolCall] = []
        self._prompt_logprobs: generate_pb2.PromptLogprobs | None = None
        self.has_any = False  # whether some wait

    def add(self, delta: TokenDelta) -> None:
        """Adds those of new tokens."""
        self._reasoning += delta.reasoning
        self._tool_calls += delta.tool_calls
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self.has_any = bool(self._reasoning or self._tool_calls or self._prompt_logprobs)

    def move_to(self, delta: generate_pb2.TokenDelta) -> None:
        """Replaces those of a message, which may have been sent before."""
        delta.reasoning = self._reasoning
        del delta.tool_calls[:]
        delta.tool_calls.extend(self._tool_calls)
        delta.ClearField("prompt_logprobs")
        if self._prompt_logprobs is not None:
            delta.prompt_logprobs.CopyFrom(self._prompt_logprobs)
        self._reasoning, self._tool_calls, self._prompt_logprobs = "", [], None
        self.has_any = False
