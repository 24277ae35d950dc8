"""The servers that a load is sent to: a protocol for all, and Baton by gRPC. openai_server.py is any server by HTTP."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton import AsyncClient
from baton.errors import BatonError
from baton.images import user_message
from baton.inference.v1 import generate_pb2, sampling_pb2
from devtools.bench.workload import Planned


@dataclass(frozen=True, slots=True)
class Answer:
    """The facts that a server tells of an answer at its end. Those that it does not tell are 0 or empty."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    worker_id: str = ""  # that ran the prompt


class RequestFailed(Exception):
    """A request got no whole answer. `kind` is what the report counts: an error's class, or an HTTP status."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class BenchServer(Protocol):
    """A server under load."""

    async def models(self) -> Sequence[str]:
        """The names of the models that it serves now. Raises Unavailable if it does not answer."""

    async def answer(self, model: str, planned: Planned, came: Callable[[], None]) -> Answer:
        """Sends a request, and calls `came` for each message with new tokens. Raises RequestFailed."""


class GrpcServer:
    """Baton's router by gRPC. Its connections share the requests by turns; see BenchServer."""

    def __init__(
        self, clients: Sequence[AsyncClient], topology: generate_pb2.Topology.ValueType, timeout_seconds: float
    ) -> None:
        self._clients = clients
        self._topology = topology
        self._timeout_seconds = timeout_seconds
        self._sent = 0

    async def models(self) -> Sequence[str]:
        return [model.name for model in await self._clients[0].models()]

    async def answer(self, model: str, planned: Planned, came: Callable[[], None]) -> Answer:
        client = self._clients[self._sent % len(self._clients)]
        self._sent += 1
        finished = generate_pb2.Finished()
        try:
            async for event in client.generate(self._request(model, planned), timeout_seconds=self._timeout_seconds):
                if event.HasField("token"):
                    came()
                elif event.HasField("finished"):
                    finished = event.finished
        except BatonError as error:
            raise RequestFailed(type(error).__name__, error.message) from error
        usage = finished.usage
        worker = finished.prefill_worker_id or finished.decode_worker_id
        return Answer(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, worker)

    def _request(self, model: str, planned: Planned) -> generate_pb2.GenerateRequest:
        request = generate_pb2.GenerateRequest(
            model=model,
            stopping=sampling_pb2.StoppingOptions(max_tokens=planned.output_tokens, ignore_eos=True),
            routing=generate_pb2.RoutingOptions(topology=self._topology),
        )
        if planned.images:
            request.chat.messages.append(user_message(planned.text, planned.images))
        else:
            request.token_ids.ids.extend(planned.token_ids)
        return request
