"""The Python client: a router's RPCs as methods, its failures as BatonErrors."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType

from baton.inference.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    generate_pb2,
    inference_service_pb2_grpc,
    model_pb2,
    tokenize_pb2,
)
from typing_extensions import Self

from rpc.calls import stream, unary
from rpc.channels import open_channel
from rpc.tls import TlsConfig

# For every call but Generate, whose time is the model's.
CALL_SECONDS = 30.0


class Client:
    """A connection to a router: `async with Client("127.0.0.1:7070") as client: ...`. Connects when first used.

    Every method raises the class of rpc.errors that the status stands for. One client serves any number of calls at
    once, of one event loop.
    """

    def __init__(self, address: str, tls: TlsConfig | None = None) -> None:
        self.address = address
        self._channel = open_channel(address, tls)
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._cluster = cluster_service_pb2_grpc.ClusterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def generate(
        self, request: generate_pb2.GenerateRequest | str, *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Streams an answer: Started, tokens, Finished. A string is a prompt with the model's defaults.

            async with aclosing(client.generate("Sort: pear apple mango")) as events:
                async for event in events:
                    print(event.token.text, end="")

        Closing the generator, or cancelling the task that reads it, stops the request on the workers.
        """
        message = generate_pb2.GenerateRequest(prompt=request) if isinstance(request, str) else request
        call = self._inference.Generate(message, timeout=timeout_seconds)
        async with aclosing(stream(call)) as responses:
            async for response in responses:
                yield response

    async def cancel(self, request_id: str) -> Sequence[generate_pb2.CancelReceipt]:
        """Stops a running request, anybody's, and returns what each stage confirmed."""
        request = generate_pb2.CancelGenerationRequest(request_id=request_id)
        return (await unary(self._inference.CancelGeneration(request, timeout=CALL_SECONDS))).receipts

    async def tokenize(self, prompt: str, model: str = "") -> Sequence[int]:
        """The ids of a prompt, as Generate would run them."""
        request = tokenize_pb2.TokenizeRequest(model=model, prompt=prompt)
        return (await unary(self._inference.Tokenize(request, timeout=CALL_SECONDS))).token_ids

    async def models(self) -> Sequence[model_pb2.Model]:
        """The models that are served, with their limits and how many workers each has."""
        request = model_pb2.ListModelsRequest()
        return (await unary(self._inference.ListModels(request, timeout=CALL_SECONDS))).models

    async def workers(self) -> Sequence[cluster_service_pb2.Worker]:
        """The workers as the router sees them: state, load, layout."""
        request = cluster_service_pb2.ListWorkersRequest()
        return (await unary(self._cluster.ListWorkers(request, timeout=CALL_SECONDS))).workers
