"""The memory that cancelled calls leave in their caller: grpc.aio frees what came for a task only in this task."""

import asyncio
import gc
from collections.abc import Awaitable, Callable

from grpc import aio
from support.eventually import eventually
from support.servers.scripted_router import Scripted, scripted

from baton.calls import stream, unary
from baton.inference.v1 import generate_pb2 as pb
from benchmarks.leftovers.heap import heap

_GENERATE = "/baton.inference.v1.InferenceService/Generate"
_CONTENT = "x" * 2**20
_CALLS = 32
_MOST_BYTES = _CALLS * len(_CONTENT) // 4


class Sending:
    """Sends three large responses, and never ends."""

    def __init__(self) -> None:
        self.sent = 0

    async def generate(self, request: object, context: aio.ServicerContext) -> None:
        for _ in range(3):
            await context.write(pb.GenerateResponse(request_id=_CONTENT))
            self.sent += 1
        await asyncio.Event().wait()


async def is_freed_after(act: Callable[[], Awaitable[None]]) -> None:
    """Waits until malloc has no more in use than before the calls. Fails if that does not come."""
    for _ in range(4):
        await act()
    before = heap().malloc_used
    for _ in range(_CALLS):
        await act()

    def is_freed() -> bool:
        gc.collect()
        return heap().malloc_used - before < _MOST_BYTES

    await eventually(is_freed, seconds=10)


async def cancelled(waiting: "asyncio.Future[pb.GenerateResponse]") -> None:
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_a_cancelled_reader_does_not_keep_the_response_that_comes_meanwhile() -> None:
    async with scripted(Generate=Sending().generate) as peer:
        await is_freed_after(lambda: _read_one_and_leave(peer))


async def _read_one_and_leave(peer: Scripted) -> None:
    responses = stream(peer.stub.Generate(pb.GenerateRequest()))
    await anext(responses)
    reading = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(0)  # it waits now
    await cancelled(reading)


async def test_a_cancelled_call_does_not_keep_the_response_that_came_before_its_status() -> None:
    sending = Sending()
    async with scripted(Generate=sending.generate) as peer:
        # A method with one response that comes before its status.
        method = peer.channel.unary_unary(
            _GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )

        async def act() -> None:
            sending.sent = 0
            calling = asyncio.ensure_future(unary(method(pb.GenerateRequest())))
            await eventually(lambda: sending.sent > 0)
            await cancelled(calling)

        await is_freed_after(act)
