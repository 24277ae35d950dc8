"""A worker that decodes slowly: it gets little while others are quick."""

import asyncio

from support.cluster.in_process import FAST_ROUTER, PREFILL, Bench, bench, simulated

STEP_SECONDS = 0.02


async def answered_by(running: Bench, count: int) -> list[str]:
    """The decode workers of requests that were sent at the same time."""
    answers = await asyncio.gather(*(running.generate(prompt="abc", stopping={"max_tokens": 16}) for _ in range(count)))
    return [answer.finished.decode_worker_id for answer in answers]


async def test_a_worker_five_times_as_slow_as_another_gets_little_once_that_is_known() -> None:
    quick = simulated("quick", "decode", decode_step_seconds=STEP_SECONDS)
    slow = simulated("slow", "decode", decode_step_seconds=5 * STEP_SECONDS)
    async with bench(PREFILL, quick, slow, router=FAST_ROUTER) as running:
        # Half of them at first, and a sixth in the end. A machine that stands still makes the quick one look slower.
        assert (await answered_by(running, 8)).count("slow") >= 1
        later = [*await answered_by(running, 8), *await answered_by(running, 8)]
        assert later.count("slow") <= 6
