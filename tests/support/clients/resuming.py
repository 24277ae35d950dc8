"""A client that keeps the sums of an answer's messages, and asks for the rest, as any client that resumes has to."""

from dataclasses import dataclass, field
from typing import Any

from baton.inference.v1 import generate_pb2


@dataclass
class Received:
    """Everything that has come of the answers to one request, over any number of streams."""

    request: generate_pb2.GenerateRequest
    handle: str = ""
    seed: int = 0
    attempt: int = 0
    positions: dict[int, generate_pb2.AnswerPosition] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasoning: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[tuple[str, str, str]]] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    finished: generate_pb2.Finished | None = None
    resumed: list[generate_pb2.Resumed] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.ids.values())

    def add(self, message: generate_pb2.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "started":
                self._note(message.started)
            case "resumed":
                self.resumed.append(message.resumed)
                self._note(message.resumed.started)
            case "token":
                self._add(message.token)
            case "answer_finished":
                assert message.answer_finished.index not in self.ends
                self.ends[message.answer_finished.index] = message.answer_finished.reason
                self._position(message.answer_finished.index).is_finished = True
            case "finished":
                self.finished = message.finished

    def resume(self, *, with_copy: bool = True) -> generate_pb2.ResumeGenerationRequest:
        self.attempt += 1
        asked = generate_pb2.ResumeGenerationRequest(
            handle=self.handle, attempt=self.attempt, have=self.positions.values()
        )
        if with_copy:
            asked.request.CopyFrom(self.request)
            asked.request.sampling.seed = self.seed
            for index in range(max(self.ids, default=-1) + 1):
                asked.received.add(ids=self.ids.get(index, []))
        return asked

    @property
    def whole(self) -> tuple[Any, ...]:
        """The result of an undisturbed run, too."""
        assert self.finished is not None
        usage = self.finished.usage
        return (
            self.ids,
            self.texts,
            self.reasoning,
            {index: [call[1:] for call in calls] for index, calls in self.calls.items()},
            self.logprobs,
            self.ends,
            (self.finished.reason, self.finished.stop_string, usage.prompt_tokens, usage.completion_tokens),
        )

    def _note(self, started: generate_pb2.Started) -> None:
        if started.resumption.handle:
            self.handle, self.seed = started.resumption.handle, started.resumption.seed

    def _position(self, index: int) -> generate_pb2.AnswerPosition:
        return self.positions.setdefault(index, generate_pb2.AnswerPosition(index=index))

    def _add(self, token: generate_pb2.TokenDelta) -> None:
        position = self._position(token.index)
        position.tokens += len(token.token_ids)
        position.text_bytes += len(token.text.encode())
        position.reasoning_bytes += len(token.reasoning.encode())
        position.tool_calls += len(token.tool_calls)
        self.ids.setdefault(token.index, []).extend(token.token_ids)
        self.texts[token.index] = self.texts.get(token.index, "") + token.text
        self.reasoning[token.index] = self.reasoning.get(token.index, "") + token.reasoning
        called = [(call.id, call.name, call.arguments) for call in token.tool_calls]
        self.calls.setdefault(token.index, []).extend(called)
        logprobs = [(one.token_id, one.logprob) for one in token.logprobs]
        self.logprobs.setdefault(token.index, []).extend(logprobs)
