"""Tenant, priority and deadline, as they travel beside a request."""

from typing import Any

import pytest
from baton.inference.v1 import model_pb2
from grpc import aio
from support.scripted import scripted

from rpc import metadata
from rpc.calls import unary
from rpc.errors import InvalidRequest


async def context_of(read: Any, *pairs: tuple[str, str], timeout: float | None = None) -> Any:
    """What `read` finds in the context of a call with this metadata."""
    found: list[Any] = []

    async def get_model(request: object, context: aio.ServicerContext) -> model_pb2.GetModelResponse:
        found.append(read(context))
        return model_pb2.GetModelResponse()

    async with scripted(GetModel=get_model) as peer:
        await unary(peer.stub.GetModel(model_pb2.GetModelRequest(), metadata=pairs, timeout=timeout))
    return found[0]


async def test_a_call_carries_its_tenant() -> None:
    assert await context_of(metadata.tenant, ("x-baton-tenant", "a")) == "a"


async def test_a_call_without_a_tenant_has_an_empty_one() -> None:
    assert await context_of(metadata.tenant) == ""


async def test_a_call_carries_its_priority() -> None:
    assert await context_of(metadata.priority, ("x-baton-priority", "-3")) == -3


async def test_a_call_without_a_priority_has_0() -> None:
    assert await context_of(metadata.priority) == 0


async def test_a_priority_that_is_no_number_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="x-baton-priority: 'high' is not a whole number"):
        await context_of(metadata.priority, ("x-baton-priority", "high"))


async def test_a_call_carries_what_remains_of_its_deadline() -> None:
    assert 0 < await context_of(metadata.remaining_seconds, timeout=5.0) <= 5.0


async def test_a_call_without_a_deadline_may_take_for_ever() -> None:
    assert await context_of(metadata.remaining_seconds) is None
