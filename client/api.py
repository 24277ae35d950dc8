"""The Python client: a router's RPCs as methods, its failures as BatonErrors."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from baton.inference.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    generate_pb2,
    inference_service_pb2_grpc,
    model_pb2,
    tokenize_pb2,
)
from typing_extensions import Self

from client.images import Image, user_message
from rpc.calls import stream, unary
from rpc.channels import open_channel
from rpc.errors import ConfigError, InvalidRequest
from rpc.metadata import PRIORITY_KEY, TENANT_KEY
from rpc.tls import TlsConfig, is_loopback

# For every call but Generate, whose time is the model's.
CALL_SECONDS = 30.0


class Client:
    """A connection to a router: `async with Client("127.0.0.1:7070") as client: ...`. Connects when first used.

    Every method raises the class of rpc.errors that the status stands for. One client serves any number of calls at
    once, of one event loop.
    """

    def __init__(self, address: str, tls: TlsConfig | None = None, *, token: str = "", tenant: str = "") -> None:
        """`tenant` is whose quota the calls count for, if no token or certificate says so (docs/admission.md).

        Raises ConfigError for files that cannot be read, and a token that would leave this host in plain text;
        InvalidRequest for a tenant that no gRPC header can carry.
        """
        if token and tls is None and not is_loopback(address.rpartition(":")[0]):
            raise ConfigError("a token is sent over TLS only: name the authority to trust")
        self.address = address
        self._metadata = (*_header("authorization", token and f"Bearer {token}"), *_header(TENANT_KEY, tenant))
        self._options: dict[str, Any] = {"timeout": CALL_SECONDS, "metadata": self._metadata}
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
        self,
        request: generate_pb2.GenerateRequest | str,
        *,
        images: Sequence[Image] = (),
        timeout_seconds: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Streams an answer: Started, tokens, Finished. A string is a prompt with the model's defaults.

        With `images` the string is a user's message about them: contents, paths of files here, or URIs. In a router's
        line the higher `priority` goes first, from -10 to 10.

            async with aclosing(client.generate("Sort: pear apple mango")) as events:
                async for event in events:
                    print(event.token.text, end="")

        Closing the generator, or cancelling the task that reads it, stops the request on the workers.
        """
        message = _message(request, images)
        metadata = (*self._metadata, *_header(PRIORITY_KEY, str(priority) if priority else ""))
        call = self._inference.Generate(message, timeout=timeout_seconds, metadata=metadata)
        async with aclosing(stream(call)) as responses:
            async for response in responses:
                yield response

    async def cancel(self, request_id: str) -> Sequence[generate_pb2.CancelReceipt]:
        """Stops a running request, anybody's, and returns what each stage confirmed."""
        request = generate_pb2.CancelGenerationRequest(request_id=request_id)
        return (await unary(self._inference.CancelGeneration(request, **self._options))).receipts

    async def tokenize(self, prompt: str, model: str = "") -> Sequence[int]:
        """The ids of a prompt, as Generate would run them."""
        request = tokenize_pb2.TokenizeRequest(model=model, prompt=prompt)
        return (await unary(self._inference.Tokenize(request, **self._options))).token_ids

    async def models(self) -> Sequence[model_pb2.Model]:
        """The models that are served, with their limits and how many workers each has."""
        request = model_pb2.ListModelsRequest()
        return (await unary(self._inference.ListModels(request, **self._options))).models

    async def workers(self) -> Sequence[cluster_service_pb2.Worker]:
        """The workers as the router sees them: state, load, layout."""
        request = cluster_service_pb2.ListWorkersRequest()
        return (await unary(self._cluster.ListWorkers(request, **self._options))).workers


def _header(key: str, value: str) -> tuple[tuple[str, str], ...]:
    if not value.isascii() or not value.isprintable():
        raise InvalidRequest.of(key, "must be printable ASCII, as all gRPC metadata")
    return ((key, value),) if value else ()


def _message(request: generate_pb2.GenerateRequest | str, images: Sequence[Image]) -> generate_pb2.GenerateRequest:
    if isinstance(request, generate_pb2.GenerateRequest):
        if images:
            raise ValueError("images go with a prompt that is a string; a GenerateRequest has media of its own")
        return request
    if not images:
        return generate_pb2.GenerateRequest(prompt=request)
    return generate_pb2.GenerateRequest(chat=generate_pb2.ChatInput(messages=[user_message(request, images)]))
