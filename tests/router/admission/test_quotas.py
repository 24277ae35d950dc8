"""Quotas of tenants, with a clock that the test sets."""

from contextlib import AsyncExitStack

import pytest
from support.clock import ManualClock

from baton.errors import QuotaExceeded
from router.admission import ledger
from router.admission import quotas as module
from router.admission.ledger import TokenBucket
from router.admission.quotas import Quotas
from router.config import QuotaConfig, QuotasConfig
from router.telemetry.stats import RequestStats


def account(tokens: int = 0) -> RequestStats:
    """A request that has generated so many tokens."""
    return RequestStats("r", completion_tokens=tokens)


def quotas(clock: ManualClock | None = None, **default: float) -> Quotas:
    return Quotas(QuotasConfig(default=QuotaConfig(**default)), clock or ManualClock())  # type: ignore[arg-type]


async def serve(which: Quotas, name: str = "acme", prompt: int = 0, generated: int = 0) -> None:
    """One request from its begin to its end."""
    async with which.track(name, account(generated)), which.charge(name, prompt):
        pass


async def retry_seconds(which: Quotas, **request: int) -> float:
    with pytest.raises(QuotaExceeded) as caught:
        await serve(which, **request)  # type: ignore[arg-type]
    assert caught.value.retry_after_seconds is not None
    return caught.value.retry_after_seconds


def test_a_bucket_fills_at_its_rate_and_holds_its_burst() -> None:
    clock = ManualClock()
    bucket = TokenBucket(10.0, 2.0, clock)
    bucket.take(20)
    assert bucket.lacks_seconds(5) == pytest.approx(0.5)
    clock.advance(0.5)
    assert bucket.lacks_seconds(5) == 0.0
    clock.advance(100)
    assert bucket.is_full
    assert bucket.lacks_seconds(20) == 0.0
    bucket.take(20)
    assert bucket.lacks_seconds(1) == pytest.approx(0.1)


def test_more_than_a_bucket_holds_can_be_taken_when_it_is_full_and_is_owed() -> None:
    clock = ManualClock()
    bucket = TokenBucket(10.0, 1.0, clock)
    assert bucket.lacks_seconds(60) == 0.0
    bucket.take(60)
    assert bucket.lacks_seconds(1) == pytest.approx(5.1)


def test_what_is_given_back_is_there_again_and_never_more_than_the_bucket_holds() -> None:
    clock = ManualClock()
    bucket = TokenBucket(10.0, 1.0, clock)
    bucket.take(10)
    bucket.give_back(10)
    assert bucket.lacks_seconds(10) == 0.0
    bucket.give_back(10)
    bucket.take(10)
    assert bucket.lacks_seconds(10) == pytest.approx(1.0)


def test_a_rate_of_zero_is_no_limit() -> None:
    bucket = TokenBucket(0.0, 1.0, ManualClock())
    bucket.take(1e9)
    assert bucket.lacks_seconds(1e9) == 0.0
    assert bucket.is_full


async def test_a_tenant_over_its_requests_is_told_when_to_come_back_and_may_then() -> None:
    clock = ManualClock()
    which = quotas(clock, requests_per_second=0.5, burst_seconds=4)
    await serve(which)
    await serve(which)
    seconds = await retry_seconds(which)
    assert seconds == pytest.approx(2.0)
    clock.advance(seconds)
    await serve(which)


async def test_tokens_of_prompts_and_of_answers_count() -> None:
    which = quotas(tokens_per_second=10, burst_seconds=10)
    await serve(which, prompt=60, generated=39)
    assert await retry_seconds(which, prompt=30) == pytest.approx(2.9)


async def test_a_prompt_that_is_refused_after_it_was_charged_gets_its_tokens_back() -> None:
    which = quotas(tokens_per_second=10, burst_seconds=10)
    for _ in range(5):
        with pytest.raises(ValueError, match="no room"):
            async with which.charge("acme", 100):
                raise ValueError("no room")
    await serve(which, prompt=100)


async def test_one_tenant_does_not_use_up_what_is_another_s() -> None:
    which = quotas(requests_per_second=0.1, burst_seconds=10)
    await serve(which, "acme")
    await serve(which, "other")
    assert await retry_seconds(which, name="acme") == pytest.approx(10.0)  # type: ignore[arg-type]


async def test_a_tenant_runs_no_more_at_once_than_it_may() -> None:
    which = quotas(concurrent=1)
    async with which.track("acme", account()):
        assert await retry_seconds(which) > 0
        await serve(which, "other")
    await serve(which)


async def test_a_named_tenant_has_a_quota_of_its_own() -> None:
    config = QuotasConfig(default=QuotaConfig(requests_per_second=0.01), tenants={"big": QuotaConfig()})
    which = Quotas(config, ManualClock())
    for _ in range(3):
        await serve(which, "big")
    await serve(which, "small")
    with pytest.raises(QuotaExceeded, match="small"):
        await serve(which, "small")


async def test_tenants_that_owe_nothing_are_forgotten_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TENANTS", 10)
    monkeypatch.setattr(ledger, "_MOST_TENANTS", 10)
    clock = ManualClock()
    which = quotas(clock, requests_per_second=1, burst_seconds=1, concurrent=1)
    async with which.track("runs", account()):
        for number in range(10):
            await serve(which, f"early {number}")
        clock.advance(10)
        await serve(which, "owes")
        for number in range(8):
            clock.advance(0.0625)
            await serve(which, f"late {number}")
        clock.advance(0.4)
        assert await retry_seconds(which, name="owes") == pytest.approx(0.1)  # type: ignore[arg-type]
        clock.advance(10)
        for number in range(100):
            await serve(which, f"last {number}")
            clock.advance(10)
        assert which.remembered <= 10
        with pytest.raises(QuotaExceeded, match="as many requests are running as may"):
            await serve(which, "runs")


async def test_without_quotas_nothing_is_remembered() -> None:
    which = quotas()
    async with AsyncExitStack() as stack:
        for number in range(100):
            await stack.enter_async_context(which.track(str(number), account(1000)))
            await stack.enter_async_context(which.charge(str(number), 1000))
    assert which.remembered == 0


async def test_names_that_all_owe_something_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TENANTS", 10)
    monkeypatch.setattr(ledger, "_MOST_TENANTS", 10)
    which = quotas(requests_per_second=0.001, burst_seconds=1000, concurrent=1)
    async with which.track("runs", account()):
        for number in range(1000):
            await serve(which, f"made up {number}")
        assert which.remembered <= 20
        with pytest.raises(QuotaExceeded, match="as many requests are running as may"):
            await serve(which, "runs")
