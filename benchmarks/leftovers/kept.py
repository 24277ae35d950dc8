"""Kept requests of three answers, for each end: read, cancelled, left or resumed, at their router or at another."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

from grpc import aio
from support.clients.resuming import Received

from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from benchmarks.leftovers.cluster import KEEP_SECONDS, MODEL

Stub = inference_service_pb2_grpc.InferenceServiceStub
KeptAct = Callable[[Stub, Stub], Awaitable[None]]

_SHORT, _LONG = 8, 1000


def _request(tokens: int) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        model=MODEL,
        request_id=f"kept-{random.getrandbits(64):x}",
        prompt=f"{random.random()} and more",
        stopping={"max_tokens": tokens, "ignore_eos": True},
        sampling={"n": 3, "temperature": 1.0},
        response={"keep": {"seconds": KEEP_SECONDS}},
    )


async def _read(call: Any, received: Received, until: int) -> None:
    """Reads until so many tokens have come of all answers, or to the end."""
    async for message in call:
        received.add(message)
        if received.tokens >= until:
            return


async def _begun(stub: Stub, tokens: int) -> tuple[Any, Received]:
    request = _request(tokens)
    call = stub.Generate(request, timeout=30)
    received = Received(request)
    await _read(call, received, 6)
    return call, received


async def answered(stub: Stub, other: Stub) -> None:
    """All of it is read."""
    call, received = await _begun(stub, _SHORT)
    await _read(call, received, 10**9)


async def _cancelled(stub: Stub, canceller: Stub, *, is_by_handle: bool) -> None:
    call, received = await _begun(stub, _LONG)
    named = {"handle": received.handle} if is_by_handle else {"request_id": received.request.request_id}
    await canceller.CancelGeneration(generate_pb2.CancelGenerationRequest(**named), timeout=30)
    try:
        await _read(call, received, 10**9)
    except aio.AioRpcError as error:
        if error.code().name != "CANCELLED":
            raise


async def cancelled_by_id(stub: Stub, other: Stub) -> None:
    """Its reader has not got to the end."""
    await _cancelled(stub, stub, is_by_handle=False)


async def cancelled_by_handle(stub: Stub, other: Stub) -> None:
    """Its reader has not got to the end."""
    await _cancelled(stub, stub, is_by_handle=True)


async def cancelled_elsewhere(stub: Stub, other: Stub) -> None:
    """By its handle, at the router that does not read it."""
    await _cancelled(stub, other, is_by_handle=True)


async def left(stub: Stub, other: Stub) -> None:
    """Its call ends, and its grace does later."""
    call, _ = await _begun(stub, _LONG)
    call.cancel()


async def left_and_cancelled(stub: Stub, other: Stub) -> None:
    """Its call ends, and the other router is told to cancel it."""
    call, received = await _begun(stub, _LONG)
    call.cancel()
    await other.CancelGeneration(generate_pb2.CancelGenerationRequest(handle=received.handle), timeout=30)


async def _resumed(stub: Stub, other: Stub, tokens: int, *, with_copy: bool) -> tuple[Any, Received]:
    call, received = await _begun(stub, tokens)
    call.cancel()
    again = other.ResumeGeneration(received.resume(with_copy=with_copy), timeout=30)
    await _read(again, received, 18)
    return again, received


async def resumed(stub: Stub, other: Stub) -> None:
    """At the other router, to its end."""
    call, received = await _resumed(stub, other, _SHORT, with_copy=False)
    await _read(call, received, 10**9)


async def resumed_from_copy(stub: Stub, other: Stub) -> None:
    """At the other router, to its end, with the client's copy."""
    call, received = await _resumed(stub, other, _SHORT, with_copy=True)
    await _read(call, received, 10**9)


async def resumed_and_cancelled(stub: Stub, other: Stub) -> None:
    """At the other router, and cancelled by its handle at the first one."""
    call, received = await _resumed(stub, other, _LONG, with_copy=False)
    await stub.CancelGeneration(generate_pb2.CancelGenerationRequest(handle=received.handle), timeout=30)
    try:
        await _read(call, received, 10**9)
    except aio.AioRpcError as error:
        if error.code().name != "CANCELLED":
            raise
