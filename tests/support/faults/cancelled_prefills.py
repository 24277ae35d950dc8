"""Long prompts that are cancelled while they are computed, and what the next request waits for."""

import asyncio
import time
import uuid

from support.cluster.fleet import Fleet
from support.faults.outcomes import Outcome, follow

from baton.inference.v1 import generate_pb2 as pb
from runtime.aio import timeout

CANCELLED = 10
LONGEST_WAIT_SECONDS = 1.0


async def cancel_prefills(running: Fleet, engine: str) -> None:
    """Cancels prompts that `prefill-0` computes. The next first token and the blocks wait no longer than is allowed."""
    await _seconds_to_first_token(running)
    alone = await _seconds_to_first_token(running)
    asked = [_request(1900) for _ in range(CANCELLED)]
    tasks = [
        asyncio.create_task(follow(running.stub.Generate(one, timeout=60), Outcome(one.request_id))) for one in asked
    ]
    while (await running.load("prefill-0")).running == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    after = await _seconds_to_first_token(running)
    await asyncio.gather(*tasks, return_exceptions=True)
    print(f"\n{engine}: first token after {alone * 1000:.0f} ms alone, {after * 1000:.0f} ms after the cancelled ones")
    assert after < alone + LONGEST_WAIT_SECONDS
    async with timeout(LONGEST_WAIT_SECONDS):
        while await running.blocks_used():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _request(tokens: int) -> pb.GenerateRequest:
    asked = pb.GenerateRequest(request_id=uuid.uuid4().hex)
    asked.token_ids.ids.extend(position * 7 % 200 + 20 for position in range(tokens))
    asked.stopping.max_tokens = 2
    asked.stopping.ignore_eos = True
    asked.routing.cache_salt = uuid.uuid4().hex
    return asked


async def _seconds_to_first_token(running: Fleet) -> float:
    """Of a short prompt."""
    started = time.monotonic()
    call = running.stub.Generate(_request(16), timeout=60)
    async for message in call:
        if message.token.token_ids:
            break
    call.cancel()
    return time.monotonic() - started
