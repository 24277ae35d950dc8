"""The writing of a shared stream's requests: one that comes alone at once, those after it together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.eventually import eventually

from baton.engine.v1 import multiplex_pb2 as pb
from baton.errors import BatonError, Unavailable
from baton.inference.v1 import inference_service_pb2_grpc as inference
from baton.inference.v1 import model_pb2
from engine_protocol.multiplex.channel import multiplexed
from engine_protocol.multiplex.peer_stream import PushResponse
from rpc.channels import open_channel


@dataclass
class Peer:
    """A peer that reads, and never answers. `written` has the messages that it was sent without waiting."""

    written: list[pb.MultiplexRequest] = field(default_factory=list)
    waited_for: list[pb.MultiplexRequest] = field(default_factory=list)

    async def write(self, message: pb.MultiplexRequest) -> None:
        self.waited_for.append(message)

    def write_now(self, message: pb.MultiplexRequest) -> bool:
        self.written.append(message)
        return True

    async def end(self) -> BatonError:
        await asyncio.get_running_loop().create_future()
        return Unavailable("is never reached")

    @property
    def starts(self) -> list[int]:
        """The number of calls that each message begins."""
        return [len(message.starts) for message in self.written]


@asynccontextmanager
async def calling() -> AsyncGenerator[tuple[Peer, Any], None]:
    """A stub whose first call was written, and from then on what is written without waiting."""
    peer = Peer()

    @asynccontextmanager
    async def open_stream(_push: PushResponse) -> AsyncGenerator[Peer, None]:
        yield peer

    async with open_channel("127.0.0.1:1") as channel, multiplexed(channel, open_stream) as calls:
        stub: Any = inference.InferenceServiceStub(calls)
        stub.GetModel(model_pb2.GetModelRequest())
        await eventually(lambda: bool(peer.waited_for))
        await asyncio.sleep(0)
        yield peer, stub


async def test_a_request_that_comes_alone_is_written_at_once() -> None:
    async with calling() as (peer, stub):
        stub.GetModel(model_pb2.GetModelRequest(name="a"))
        assert peer.starts == [1]


async def test_requests_that_follow_in_the_same_turn_are_written_together() -> None:
    async with calling() as (peer, stub):
        for _ in range(4):
            stub.GetModel(model_pb2.GetModelRequest(name="a"))
        assert peer.starts == [1]
        await asyncio.sleep(0)
        assert peer.starts == [1, 3]


async def test_nothing_is_written_at_the_end_of_a_turn_that_left_nothing_to_write() -> None:
    async with calling() as (peer, stub):
        stub.GetModel(model_pb2.GetModelRequest(name="a"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert peer.starts == [1]


async def test_what_is_written_at_once_has_the_deadline_and_metadata_of_its_call() -> None:
    async with calling() as (peer, stub):
        stub.GetModel(model_pb2.GetModelRequest(name="a"), timeout=5, metadata=(("k", "v"),))
        (start,) = peer.written[0].starts
        assert start.timeout.seconds in (4, 5)
        assert [(each.key, each.value) for each in start.metadata] == [("k", b"v")]
