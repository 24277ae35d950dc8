"""Metadata that clients in other languages can send and gRPC for Python cannot."""

import asyncio

import pytest
from support.cluster.in_process import Bench
from support.http2.client import Headers, raw_client

from baton import AsyncClient
from baton.inference.v1 import generate_pb2 as pb
from runtime.aio import timeout

GENERATE = "/baton.inference.v1.InferenceService/Generate"
INVALID_ARGUMENT = "3"


async def status(running: Bench, *metadata: tuple[bytes, bytes]) -> tuple[str, str]:
    """Status and message of a request that would be answered at once."""
    request = pb.GenerateRequest(prompt="x", stopping={"max_tokens": 3})
    headers: Headers = metadata
    async with timeout(10), raw_client(running.address) as client:
        trailers = await client.call(GENERATE, request.SerializeToString(), headers)
    return trailers["grpc-status"], trailers.get("grpc-message", "")


@pytest.mark.parametrize("tenant", ["Jörg".encode(), b"\xff\xfe", "租户".encode(), b"a\x80"])
async def test_a_tenant_that_is_not_ascii_is_refused(pair: Bench, tenant: bytes) -> None:
    code, message = await status(pair, (b"x-baton-tenant", tenant))
    assert code == INVALID_ARGUMENT
    assert message.startswith("x-baton-tenant: must be")


async def test_any_metadata_leaves_a_call_with_a_status(pair: Bench) -> None:
    keys = [b"traceparent", b"tracestate", b"x-baton-priority", b"x-baton-tenant", b"x-baton-fault", b"authorization"]
    values = [b"", b"\xff", "é".encode(), b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01", b"\xc3", b"a=" + b"\xe9" * 9]
    results = await asyncio.gather(*(status(pair, (key, value)) for key in keys for value in values))
    assert {code for code, _ in results} <= {"0", INVALID_ARGUMENT, "7"}


@pytest.mark.parametrize("longest", ["99999999S", "2100000H", "2500000H", "2562047H", "2562048H", "99999999H"])
async def test_a_deadline_however_far_is_not_over_at_once(pair: Bench, longest: str) -> None:
    assert await status(pair, (b"grpc-timeout", longest.encode())) == ("0", "")


@pytest.mark.parametrize("seconds", [9.3e9, 1e20, float("inf")])
async def test_the_python_client_may_wait_for_ever(pair: Bench, seconds: float) -> None:
    request = pb.GenerateRequest(prompt="x", stopping={"max_tokens": 1})
    async with AsyncClient(pair.address) as client:
        events = [event async for event in client.generate(request, timeout_seconds=seconds)]
    assert events[-1].finished.usage.completion_tokens == 1
