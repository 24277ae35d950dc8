"""The deadline in a call's metadata."""

from typing import Any

from grpc import aio
from support.servers.scripted_router import scripted

from baton.calls import unary
from baton.inference.v1 import model_pb2
from rpc.metadata import remaining_seconds


async def remaining(timeout: float | None) -> float | None:
    """The time left that the server of a call with this timeout is told."""
    found: list[Any] = []

    async def get_model(request: object, context: aio.ServicerContext) -> model_pb2.GetModelResponse:
        found.append(remaining_seconds(context))
        return model_pb2.GetModelResponse()

    async with scripted(GetModel=get_model) as peer:
        await unary(peer.stub.GetModel(model_pb2.GetModelRequest(), timeout=timeout))
    return found[0]


async def test_a_call_carries_what_remains_of_its_deadline() -> None:
    # gRPC rounds a timeout up, by up to a hundredth.
    assert 0 < await remaining(5.0) <= 5.1


async def test_a_call_without_a_deadline_may_take_for_ever() -> None:
    assert await remaining(None) is None
