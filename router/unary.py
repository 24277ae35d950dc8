"""A streamed answer collected into one message."""

from baton.inference.v1 import generate_pb2


class Collected:
    """Takes what a stream would send. `response` is complete once the stream has ended well."""

    def __init__(self) -> None:
        self.response = generate_pb2.GenerateUnaryResponse(token=generate_pb2.TokenDelta())
        self._texts: list[str] = []

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Takes the next message."""
        match message.WhichOneof("event"):
            case "started":
                self.response.request_id = message.request_id
                self.response.started.CopyFrom(message.started)
            case "token":
                self._texts.append(message.token.text)
                self.response.token.token_ids.extend(message.token.token_ids)
                self.response.token.logprobs.extend(message.token.logprobs)
            case "finished":
                self.response.token.text = "".join(self._texts)
                self.response.finished.CopyFrom(message.finished)
