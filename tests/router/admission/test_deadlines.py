"""Admission control: deadlines that cannot be met."""

import asyncio
from typing import Any

import grpc
from support.cluster.in_process import Bench, bench, simulated
from support.eventually import eventually
from support.router.admission import (
    DECODE,
    PREFILL,
    SLOW_PREFILL,
    reason,
    refusal,
    request,
    retry_seconds,
    router,
    run,
)

from router.config import AdmissionConfig


async def warm(running: Bench) -> None:
    """So that the router knows how fast its workers are, with prompts that are in no cache."""
    for letter in "kmno":
        await run(running, prompt=letter * 20)


async def test_what_cannot_be_done_in_time_is_refused_at_once_and_before_prefill() -> None:
    async with bench(SLOW_PREFILL, DECODE) as running:
        await warm(running)
        error = await refusal(running, prompt="y" * 200, timeout=1.0)
        assert reason(error) == ("RESOURCE_EXHAUSTED", "DEADLINE_UNREACHABLE")
        assert retry_seconds(error) > 0
        assert running.workers["p1"].engine.load().running == 0


async def test_what_others_wait_for_counts() -> None:
    async with bench(SLOW_PREFILL, DECODE) as running:
        await warm(running)
        others = [asyncio.create_task(run(running, prompt=letter * 120)) for letter in "abcd"]
        engine = running.workers["p1"].engine
        await eventually(lambda: engine.load().running + engine.load().waiting == 4)
        error = await refusal(running, prompt="y" * 60, timeout=1.5)
        assert reason(error) == ("RESOURCE_EXHAUSTED", "DEADLINE_UNREACHABLE")
        await asyncio.gather(*others)


async def test_a_storm_of_cancelled_requests_does_not_make_others_hopeless() -> None:
    async with bench(simulated("p1", "prefill", prefill_base_seconds=0.3), DECODE) as running:
        calls: list[Any] = []

        async def storm() -> None:
            # Each is cancelled before its prompt is computed, and there is never a moment without one that runs.
            while True:
                calls.append(running.stub.Generate(request(prompt="y" * 4000)))
                if len(calls) > 20:
                    calls.pop(0).cancel()
                await asyncio.sleep(0.005)

        storming = asyncio.create_task(storm())
        try:
            for letter in "abcde":
                await run(running, prompt=letter)
            for letter in "klmno":
                await run(running, prompt=letter, timeout=30)
        finally:
            storming.cancel()
            for call in calls:
                call.cancel()


async def test_the_answer_s_length_counts() -> None:
    async with bench(PREFILL, DECODE) as running:
        await warm(running)
        error = await refusal(running, tokens=300, timeout=1.0)
        assert reason(error) == ("RESOURCE_EXHAUSTED", "DEADLINE_UNREACHABLE")
        await run(running, tokens=30, timeout=60)


async def test_what_is_not_known_is_let_in() -> None:
    async with bench(SLOW_PREFILL, DECODE) as running:
        error = await refusal(running, prompt="y" * 200, timeout=0.3)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_without_prediction_everything_is_let_in() -> None:
    config = router(AdmissionConfig(predict_deadlines=False))
    async with bench(SLOW_PREFILL, DECODE, router=config) as running:
        await warm(running)
        error = await refusal(running, prompt="y" * 200, timeout=0.3)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
