"""Makes one response of a stream's messages."""

from baton.inference.v1 import generate_pb2


class UnaryCollector:
    """Collects a stream's messages into one response. `response` is complete once the stream has ended well."""

    def __init__(self) -> None:
        self.response = generate_pb2.GenerateUnaryResponse(token=generate_pb2.TokenDelta())
        self._answers: dict[int, generate_pb2.TokenDelta] = {0: self.response.token}
        self._texts: dict[int, list[str]] = {0: []}
        self._reasoning: dict[int, list[str]] = {}
        self._ends: list[generate_pb2.AnswerFinished] = []

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Adds the next message."""
        match message.WhichOneof("event"):
            case "started":
                self.response.request_id = message.request_id
                self.response.started.CopyFrom(message.started)
            case "token":
                self._add(message.token)
            case "answer_finished":
                self._ends.append(message.answer_finished)
            case "finished":
                self._complete(message.finished)

    def _add(self, delta: generate_pb2.TokenDelta) -> None:
        answer = self._answers.setdefault(delta.index, generate_pb2.TokenDelta(index=delta.index))
        self._texts.setdefault(delta.index, []).append(delta.text)
        answer.token_ids.extend(delta.token_ids)
        answer.logprobs.extend(delta.logprobs)
        if delta.HasField("prompt_logprobs"):
            answer.prompt_logprobs.CopyFrom(delta.prompt_logprobs)
        if delta.reasoning:
            self._reasoning.setdefault(delta.index, []).append(delta.reasoning)
        answer.tool_calls.extend(delta.tool_calls)

    def _complete(self, finished: generate_pb2.Finished) -> None:
        for index, answer in self._answers.items():
            answer.text = "".join(self._texts[index])
            answer.reasoning = "".join(self._reasoning.get(index, ()))
        self.response.finished.CopyFrom(finished)
        for end in sorted(self._ends, key=lambda end: end.index):
            token = self._answers.get(end.index, generate_pb2.TokenDelta(index=end.index))
            self.response.answers.add(token=token, finished=end)
