"""A scripted server whose calls share a stream, of grpc.aio or of our own: `Sharing`; and methods for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc import aio
from support.servers.scripted_router import Scripted, scripted

from baton.calls import stream
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import inference_service_pb2_grpc as inference
from baton.inference.v1 import model_pb2
from engine_protocol.multiplex.channel import multiplexed
from engine_protocol.multiplex.peer_stream import stream_dialer
from rpc.server import ServerKind
from runtime.aio import timeout


@dataclass(frozen=True, slots=True)
class Shared:
    """A scripted server, and a stub whose calls share a stream to it."""

    peer: Scripted
    stub: inference.InferenceServiceStub

    async def read(self, prompt: str = "", **options: Any) -> list[pb.GenerateResponse]:
        """All answers of one call of Generate."""
        async with aclosing(stream(self.stub.Generate(pb.GenerateRequest(prompt=prompt), **options))) as answers:
            return [answer async for answer in answers]


class Sharing:
    """Channels whose calls share a stream of grpc.aio, or of our own."""

    def __init__(self, kind: ServerKind) -> None:
        self._dial = stream_dialer(kind, None)

    def channel(self, channel: aio.Channel, address: str) -> AbstractAsyncContextManager[aio.Channel]:
        """One on top of the channel to an address."""
        return multiplexed(channel, self._dial(address, channel))

    def beside(self, peer: Scripted) -> AbstractAsyncContextManager[aio.Channel]:
        """One to a scripted server."""
        return self.channel(peer.channel, peer.server.address)

    @asynccontextmanager
    async def calls(self, **options: Any) -> AsyncIterator[Shared]:
        """Calls to a server with these methods."""
        async with scripted(is_multiplexed=True, **options) as peer, timeout(20), self.beside(peer) as channel:
            yield Shared(peer, inference.InferenceServiceStub(channel))


async def get_model(request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
    return model_pb2.GetModelResponse(model=model_pb2.Model(name=request.name))


async def hang(request: object, context: object) -> None:
    await asyncio.Event().wait()
