"""The arrival of a call: when it was read from its connection, and not when its task had its turn."""

import asyncio
import time

import pytest
from support.cluster.server_kind import SERVER_KIND
from support.servers.scripted_router import scripted

from baton.inference.v1 import model_pb2
from rpc.interceptors.calls import arrived_at

CALLS = 40
HELD_SECONDS = 0.005


@pytest.mark.skipif(SERVER_KIND == "grpcio", reason="grpcio's server does not tell when it read a call")
async def test_calls_that_wait_for_their_turn_arrived_when_they_were_read() -> None:
    arrivals: list[float] = []
    turns: list[float] = []

    async def get_model(_request: object, _context: object) -> model_pb2.GetModelResponse:
        arrivals.append(arrived_at())
        turns.append(time.perf_counter())
        time.sleep(HELD_SECONDS)  # noqa: ASYNC251 (holds the loop, as a busy router is held)
        return model_pb2.GetModelResponse()

    async with scripted(GetModel=get_model) as peer:
        await peer.stub.GetModel(model_pb2.GetModelRequest())
        arrivals.clear()
        turns.clear()
        await asyncio.gather(*(peer.stub.GetModel(model_pb2.GetModelRequest()) for _ in range(CALLS)))
    # They are written together, and so read in a few pieces; those of one piece wait for one another.
    assert turns[-1] - turns[0] >= (CALLS - 1) * HELD_SECONDS
    waited = [turn - arrival for turn, arrival in zip(turns, arrivals, strict=True)]
    assert max(waited) > 5 * HELD_SECONDS
