"""Admission control: the quotas of tenants at one router."""

import asyncio

import pytest
from google.rpc import error_details_pb2
from support.cluster.in_process import bench
from support.eventually import eventually
from support.router.admission import (
    DECODE,
    PREFILL,
    limited,
    occupy,
    reason,
    refusal,
    retry_seconds,
    router,
    run,
    status_of,
)

from router.config import QuotaConfig, QuotasConfig


async def test_a_tenant_over_its_requests_is_refused_with_its_name_and_when_to_come_back() -> None:
    async with bench(PREFILL, DECODE, router=limited(requests_per_second=0.1, burst_seconds=20)) as running:
        for _ in range(2):
            await run(running, tenant="acme")
        error = await refusal(running, tenant="acme")
        assert reason(error) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert 2 < retry_seconds(error) <= 10
        quota = error_details_pb2.QuotaFailure()
        assert any(detail.Unpack(quota) for detail in status_of(error).details)
        assert [violation.subject for violation in quota.violations] == ["acme"]


async def test_one_tenant_does_not_use_up_what_is_another_s() -> None:
    async with bench(PREFILL, DECODE, router=limited(requests_per_second=0.1, burst_seconds=10)) as running:
        await run(running, tenant="acme")
        await run(running, tenant="other")
        await refusal(running, tenant="acme")


async def test_a_bucket_fills_with_time() -> None:
    async with bench(PREFILL, DECODE, router=limited(requests_per_second=0.5, burst_seconds=2)) as running:
        await run(running)
        error = await refusal(running)
        await asyncio.sleep(retry_seconds(error) + 0.02)
        await run(running)


async def test_the_tokens_of_prompts_and_answers_count() -> None:
    async with bench(PREFILL, DECODE, router=limited(tokens_per_second=1, burst_seconds=100)) as running:
        await run(running, prompt="x" * 60, tokens=39)
        error = await refusal(running, prompt="y" * 30)
        # 100 there were, 99 are gone.
        assert retry_seconds(error) == pytest.approx(29, abs=8)


async def test_a_prompt_larger_than_the_bucket_runs_when_the_bucket_is_full() -> None:
    async with bench(PREFILL, DECODE, router=limited(tokens_per_second=10, burst_seconds=1)) as running:
        await run(running, prompt="x" * 60)
        assert reason(await refusal(running)) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")


async def test_a_tenant_runs_no_more_at_once_than_it_may() -> None:
    async with bench(PREFILL, DECODE, router=limited(concurrent=1)) as running:
        inside = await occupy(running)
        assert reason(await refusal(running)) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        await run(running, tenant="other")
        inside.cancel()
        await eventually(lambda: running.used_blocks() == 0)
        await run(running)


async def test_a_named_tenant_has_a_quota_of_its_own() -> None:
    quotas = QuotasConfig(default=QuotaConfig(requests_per_second=0.01), tenants={"big": QuotaConfig()})
    async with bench(PREFILL, DECODE, router=router(quotas=quotas)) as running:
        for _ in range(3):
            await run(running, tenant="big")
        await run(running, tenant="small")
        await refusal(running, tenant="small")
