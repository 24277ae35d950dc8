"""A delay in a stage shows in that stage of the timings: 200 ms in each, injected or real."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated
from support.eventually import eventually
from support.images.simulated_workers import about, different, multimodal

from baton.inference.v1 import generate_pb2, timing_pb2
from baton.inference.v1.timing_pb2 import StageTiming
from router.config import AdmissionConfig

DELAY = 0.2
MEASURED = 0.99 * DELAY  # by another clock
TRIES = 5
ALLOWING = FAST_ROUTER.model_copy(update={"allow_faults": True})
WORKERS = [
    multimodal("e1", "encode", allow_faults=True),
    multimodal("p1", "prefill", allow_faults=True),
    multimodal("d1", "decode", allow_faults=True),
]

# Which moment of a plan is in which stage, and whether the first token waits for it.
MOMENTS = [
    ("admission", "ADMISSION", True),
    ("tokenize", "TOKENIZE", True),
    ("route", "ROUTE", True),
    ("encode", "ENCODE", True),
    ("queue", "PREFILL_QUEUE", True),
    ("prefill", "PREFILL_COMPUTE", True),
    ("reserve", "HANDOFF_WAIT", False),
    ("pull", "HANDOFF_TRANSFER", False),
    ("queue;role=decode", "DECODE_QUEUE", False),
    ("decode:4", "DECODE", False),
    ("detokenize", "DETOKENIZE", True),
]


def sums(timings: Sequence[StageTiming], field: str = "duration") -> dict[str, float]:
    """Seconds of each stage."""
    found: dict[str, float] = {}
    for timing in timings:
        name = timing_pb2.Stage.Name(timing.stage).removeprefix("STAGE_")
        found[name] = found.get(name, 0.0) + getattr(timing, field).ToNanoseconds() / 1e9
    return found


async def finished(running: Bench, metadata: Mapping[str, str], **fields: Any) -> generate_pb2.Finished:
    call = running.stub.Generate(generate_pb2.GenerateRequest(**fields), timeout=60, metadata=tuple(metadata.items()))
    return [message async for message in call][-1].finished


async def slowest_is(stage: str, ask: Callable[[], Awaitable[generate_pb2.Finished]]) -> generate_pb2.Finished:
    """The answer to a request whose longest stage is this one; on a busy machine another may be so once in a while."""
    for _ in range(TRIES):
        end = await ask()
        seconds = sums(end.timings)
        assert seconds[stage] >= MEASURED
        if max(seconds, key=lambda name: seconds[name]) == stage:
            return end
    raise AssertionError(f"{stage} is never the longest: {seconds}")


@pytest.mark.parametrize(("moment", "stage", "is_before"), MOMENTS, ids=[stage for _, stage, _ in MOMENTS])
async def test_a_planned_delay_is_in_its_stage(moment: str, stage: str, is_before: bool) -> None:
    async with bench(*WORKERS, router=ALLOWING) as running:
        plan = {"x-baton-fault": f"delay={DELAY}@{moment}"}
        # A picture each: what is in the cache is not encoded.
        pictures = iter(different(TRIES))
        end = await slowest_is(stage, lambda: finished(running, plan, **about(next(pictures))))
    assert (sums(end.timings, "before_first_token")[stage] >= MEASURED) is is_before


@pytest.mark.parametrize(
    ("stage", "slow"),
    [
        ("ENCODE", multimodal("e2", "encode", encode_seconds=DELAY)),
        ("PREFILL_COMPUTE", multimodal("p2", "prefill", prefill_base_seconds=DELAY)),
        ("DECODE", multimodal("d2", "decode", decode_step_seconds=DELAY / 5)),
    ],
)
async def test_an_engine_that_is_slow_is_slow_in_its_own_stage(stage: str, slow: Any) -> None:
    others = [config for config in WORKERS if config.roles != slow.roles]
    async with bench(slow, *others) as running:
        pictures = iter(different(TRIES))
        await slowest_is(stage, lambda: finished(running, {}, **about(next(pictures), max_tokens=8)))


async def test_the_wait_to_be_let_in_is_admission() -> None:
    one = FAST_ROUTER.model_copy(update={"admission": AdmissionConfig(max_running_per_worker=1)})
    slow = simulated("d1", "decode", decode_step_seconds=0.02)
    async with bench(simulated("p1", "prefill"), slow, router=one) as running:
        first = asyncio.create_task(finished(running, {}, prompt="hello", stopping={"max_tokens": 30}))
        await eventually(lambda: running.workers["d1"].engine.load().running > 0)
        seconds = sums((await finished(running, {}, prompt="hello", stopping={"max_tokens": 2})).timings)
        await first
    assert max(seconds, key=lambda name: seconds[name]) == "ADMISSION"


async def test_the_wait_for_room_in_the_pool_is_handoff_wait() -> None:
    full = simulated("d1", "decode", decode_step_seconds=0.02).model_copy()
    full = full.model_copy(update={"engine": full.engine.model_copy(update={"num_blocks": 3})})
    async with bench(simulated("p1", "prefill"), full) as running:
        first = asyncio.create_task(finished(running, {}, prompt="x" * 16, stopping={"max_tokens": 15}))
        await eventually(lambda: running.workers["d1"].engine.load().running > 0)
        end = await finished(running, {}, prompt="y" * 32, stopping={"max_tokens": 2})
        await first
    seconds = sums(end.timings)
    assert max(seconds, key=lambda name: seconds[name]) == "HANDOFF_WAIT"
