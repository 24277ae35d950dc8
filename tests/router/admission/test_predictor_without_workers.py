"""Predicting the end of a request whose decode workers are gone."""

import grpc
import pytest
from support.cluster.in_process import Bench, bench, simulated


async def test_a_deadline_without_a_decode_worker_is_unavailable_and_not_our_fault() -> None:
    prefill = simulated("p1", "prefill", prefill_tokens_per_second=2000.0)
    decode = simulated("d1", "decode", decode_step_seconds=0.002)
    async with bench(prefill, decode) as running:
        for number in range(8):
            await running.generate(prompt=f"{number}: learn how quick they are", stopping={"max_tokens": 8})
        await _lose_decode(running)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.generate(prompt="who decodes this?")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def _lose_decode(running: Bench) -> None:
    await running.stop("d1")
    await running.ready(1)
