"""What few answers have besides text."""

from baton.inference.v1 import generate_pb2
from router.text.completion import TokenDelta


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
