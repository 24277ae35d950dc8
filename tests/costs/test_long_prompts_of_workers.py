"""The time that a worker's event loop is held by a prompt of very many token ids."""

import asyncio
import time
from contextlib import aclosing
from multiprocessing.connection import Connection

import pytest
from support.cluster.in_process import simulated
from support.eventually import eventually

from baton.calls import stream, unary
from baton.engine.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, prompt_pb2
from baton.errors import InvalidRequest
from benchmarks.processes import child, received, run_process
from discovery.memory import MemoryRegistry
from rpc.channels import open_channel
from services.engines.prompt import Prompt, Sampling
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine
from services.engines.simulated.scheduler import PIECE_BLOCKS
from services.server import host_worker

IDS, CONTEXT = 600_000, 700_000
_BLOCK_TOKENS = 16
PROMPT = prompt_pb2.Prompt(token_ids=[200 + place % 50 for place in range(IDS)])
SAMPLING = prompt_pb2.Sampling(stop={"max_tokens": 2})


def run_worker(pipe: Connection) -> None:
    """Answers each message with the most CPU time that the loop took for one turn since the last one."""

    async def serve() -> None:
        config = simulated(
            "w", "prefill", "decode", max_context_tokens=CONTEXT, num_blocks=3 * CONTEXT // _BLOCK_TOKENS
        )
        registry = MemoryRegistry("long")
        async with host_worker(config, registry):
            pipe.send(registry.workers()[0].address)
            most = 0.0
            while True:
                before = time.thread_time()
                await asyncio.sleep(0.001)
                most = max(most, time.thread_time() - before)
                if pipe.poll():
                    if pipe.recv() == "stop":
                        return
                    pipe.send(most)
                    most = 0.0

    run_process(serve)


async def longest(pipe: Connection) -> float:
    pipe.send("turn")
    return float(await received(pipe))


def seconds_of_one_copy() -> float:
    """Of the same ids, all at once."""
    began = time.thread_time()
    tuple(PROMPT.token_ids[:])
    return time.thread_time() - began


async def test_the_loop_is_held_for_about_the_time_that_a_copy_of_the_ids_takes() -> None:
    prefill = prefill_pb2.PrefillRequest(request_id="p", prompt=PROMPT, sampling=SAMPLING)
    decode = decode_pb2.DecodeRequest(request_id="d", prompt=PROMPT, sampling=SAMPLING)
    too_long = prefill_pb2.PrefillRequest(request_id="r", prompt=PROMPT, sampling=SAMPLING)
    too_long.prompt.token_ids.extend(PROMPT.token_ids)
    holds = {}
    async with child(run_worker) as (pipe, _), open_channel(await received(pipe)) as channel:
        await longest(pipe)
        with pytest.raises(InvalidRequest, match="1200000 tokens leave no room in a context of 700000"):
            await unary(prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(too_long, timeout=120))
        holds["refused"] = await longest(pipe)
        await unary(prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill, timeout=120))
        holds["prefill"] = await longest(pipe)
        async with aclosing(stream(decode_pb2_grpc.DecodeServiceStub(channel).Decode(decode, timeout=120))) as events:
            assert [event async for event in events]
        holds["decode"] = await longest(pipe)
    # Hashing them takes twenty copies' time, and looking at each of them five.
    assert max(holds.values()) < 3 * min(seconds_of_one_copy() for _ in range(3)), holds


async def test_the_cached_blocks_that_a_very_long_prompt_needs_are_emptied_in_pieces() -> None:
    tokens, size = 160_000, 16
    config = SimulatedConfig(name="demo", num_blocks=tokens // size + 10, max_context_tokens=tokens + size)
    async with SimulatedEngine(config) as engine:
        [rank] = engine._ranks.all
        most, before = 0, 0

        async def watch() -> None:
            nonlocal most, before
            while True:
                empty = len(rank.blocks._free)
                most, before = max(most, empty - before), empty
                await asyncio.sleep(0)

        for first in range(2):
            ids = (first, *(place % 200 for place in range(tokens - 10)))
            before, watching = len(rank.blocks._free), asyncio.create_task(watch())
            await (await engine.prefill(Prompt(ids), Sampling(max_tokens=1))).release()
            await eventually(lambda: engine.load().blocks_used == 0)
            watching.cancel()
        assert 0 < most <= PIECE_BLOCKS
