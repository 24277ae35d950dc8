"""Tokenize and Detokenize beside Generate: their limits, and that they delay no other calls."""

import asyncio
import time

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, Bench, bench

from baton.inference.v1 import tokenize_pb2
from router.config import LimitsConfig, QuotaConfig, QuotasConfig
from router.text.tokenizer import Tokenizer

TENANT = (("x-baton-tenant", "one"),)


async def tokenize(running: Bench, prompt: str = "hello") -> tokenize_pb2.TokenizeResponse:
    return await running.stub.Tokenize(tokenize_pb2.TokenizeRequest(prompt=prompt), timeout=60, metadata=TENANT)


async def test_tokenizing_counts_for_the_tenants_requests() -> None:
    quotas = QuotasConfig(default=QuotaConfig(requests_per_second=0.1, burst_seconds=20))
    async with bench(PREFILL, DECODE, router=FAST_ROUTER.model_copy(update={"quotas": quotas})) as running:
        assert list((await tokenize(running)).token_ids)
        await running.stub.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=[40]), timeout=60, metadata=TENANT)
        with pytest.raises(aio.AioRpcError) as refused:
            await tokenize(running)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "tenant one" in (refused.value.details() or "")


async def test_tokenizing_keeps_no_generation_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, salt: str = "") -> list[int]:
        if text == "slow":
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
        return encode(self, text, salt)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    router = FAST_ROUTER.model_copy(update={"limits": LimitsConfig(max_tokenizing=40)})
    async with bench(PREFILL, DECODE, router=router) as running:
        waiting = [asyncio.create_task(tokenize(running, "slow")) for _ in range(60)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        # More than may wait are refused, and not one of the others has ended.
        errors = [one.exception() for one in done]
        assert {one.code() for one in errors if isinstance(one, aio.AioRpcError)} == {
            grpc.StatusCode.RESOURCE_EXHAUSTED
        }
        # Too long to be tokenized on the event loop.
        started = time.monotonic()
        stream = await asyncio.wait_for(running.generate(prompt="x" * 8000, stopping={"max_tokens": 2}), 10)
        assert len(stream.token_ids) == 2
        assert time.monotonic() - started < 10
        release.set()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(one, tokenize_pb2.TokenizeResponse) for one in answers) == 40
