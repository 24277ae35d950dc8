"""Admission control: the queue, priorities, quotas of tenants, and deadlines that cannot be met."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from support.clients.scraping import sample
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated
from support.eventually import eventually

from baton.connection.credentials import PRIORITY_KEY, TENANT_KEY
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from router.config import AdmissionConfig, LimitsConfig, QuotaConfig, QuotasConfig, RouterConfig

PREFILL = simulated("p1", "prefill")
DECODE = simulated("d1", "decode", decode_step_seconds=0.01)
SLOW_PREFILL = simulated("p1", "prefill", prefill_tokens_per_second=100)  # "x" * 20 takes 0.2 s


def router(admission: AdmissionConfig | None = None, quotas: QuotasConfig | None = None) -> RouterConfig:
    update = {"admission": admission or AdmissionConfig(), "quotas": quotas or QuotasConfig()}
    return FAST_ROUTER.model_copy(update=update)


def one_at_a_time(max_waiting: int = 10) -> RouterConfig:
    return router(AdmissionConfig(max_running_per_worker=1, max_waiting=max_waiting))


def limited(**default: float) -> RouterConfig:
    return router(quotas=QuotasConfig(default=QuotaConfig(**default)))  # type: ignore[arg-type]


def request(tokens: int = 5, prompt: str = "x", request_id: str = "") -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(prompt=prompt, stopping={"max_tokens": tokens}, request_id=request_id)


async def run(running: Bench, tokens: int = 5, prompt: str = "x", timeout: float = 60, **metadata: object) -> None:
    """One request to its end; metadata by the end of its key."""
    sent = tuple((f"x-baton-{key}", str(value)) for key, value in metadata.items())
    async for _ in running.stub.Generate(request(tokens, prompt), timeout=timeout, metadata=sent):
        pass


async def refusal(running: Bench, **options: object) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await run(running, **options)  # type: ignore[arg-type]
    return caught.value


def status_of(error: aio.AioRpcError) -> status_pb2.Status:
    wire = next(value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin")
    return status_pb2.Status.FromString(wire)


def reason(error: aio.AioRpcError) -> tuple[str, str]:
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status_of(error).details)
    return error.code().name, info.reason


def retry_seconds(error: aio.AioRpcError) -> float:
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status_of(error).details)
    return retry.retry_delay.ToNanoseconds() / 1e9


async def occupy(running: Bench, tokens: int = 400) -> "aio.UnaryStreamCall[object, generate_pb2.GenerateResponse]":
    """A request that is inside, until it is cancelled."""
    call = running.stub.Generate(request(tokens))
    await call.read()
    return call


async def read_to_end(call: "aio.UnaryStreamCall[object, generate_pb2.GenerateResponse]") -> None:
    while await call.read():
        pass


async def waiting(count: int) -> None:
    """Returns when so many requests wait in this process's routers."""
    await eventually(lambda: sample("baton_router_waiting_requests") == count)


# The queue.


async def test_more_than_the_workers_may_run_wait_in_the_router() -> None:
    async with bench(PREFILL, DECODE, router=one_at_a_time()) as running:
        inside = await occupy(running)
        others = [asyncio.create_task(run(running)) for _ in range(3)]
        await waiting(3)
        await eventually(lambda: running.workers["d1"].engine.load().running == 1)
        await eventually(lambda: running.workers["p1"].engine.load().blocks_used == 0)
        inside.cancel()
        await asyncio.gather(*others)


async def test_the_most_urgent_goes_first_and_equals_in_their_order() -> None:
    async with bench(PREFILL, DECODE, router=one_at_a_time()) as running:
        inside = await occupy(running)
        ended: list[str] = []

        async def note(name: str, priority: int) -> None:
            await run(running, priority=priority)
            ended.append(name)

        tasks = []
        for name, priority in (("low", -10), ("first", 0), ("second", 0), ("high", 10), ("higher than none", 1)):
            tasks.append(asyncio.create_task(note(name, priority)))
            await waiting(len(tasks))
        inside.cancel()
        await asyncio.gather(*tasks)
        assert ended == ["high", "higher than none", "first", "second", "low"]


async def test_a_full_line_is_overloaded_and_says_when_to_come_back() -> None:
    async with bench(PREFILL, DECODE, router=one_at_a_time(max_waiting=1)) as running:
        inside = await occupy(running)
        other = asyncio.create_task(run(running))
        await waiting(1)
        error = await refusal(running)
        assert reason(error) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
        assert retry_seconds(error) > 0
        inside.cancel()
        await other


async def test_in_a_full_line_the_more_urgent_takes_the_place_of_the_last() -> None:
    async with bench(PREFILL, DECODE, router=one_at_a_time(max_waiting=1)) as running:
        inside = await occupy(running)
        last = asyncio.create_task(refusal(running, priority=-1))
        await waiting(1)
        urgent = asyncio.create_task(run(running, priority=1))
        assert reason(await last) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
        inside.cancel()
        await urgent


async def test_a_cancelled_waiter_never_reaches_a_worker() -> None:
    async with bench(PREFILL, DECODE, router=one_at_a_time()) as running:
        inside = await occupy(running)
        left = running.stub.Generate(request(prompt="left" * 50))
        await waiting(1)
        left.cancel()
        await waiting(0)
        inside.cancel()
        await run(running)
        assert running.workers["p1"].engine.load().blocks_used == 0


async def test_a_deadline_that_passes_in_the_line_says_so() -> None:
    async with bench(PREFILL, DECODE, router=one_at_a_time()) as running:
        inside = await occupy(running)
        error = await refusal(running, timeout=0.2)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        inside.cancel()


async def test_a_waiting_request_can_be_cancelled_by_its_id() -> None:
    async with bench(PREFILL, DECODE, router=one_at_a_time()) as running:
        inside = await occupy(running)
        other = running.stub.Generate(request(request_id="waiting"))
        await waiting(1)
        await running.stub.CancelGeneration(generate_pb2.CancelGenerationRequest(request_id="waiting"))
        assert await other.code() is grpc.StatusCode.CANCELLED
        inside.cancel()


async def test_a_hundred_that_come_and_go_leave_the_line_as_it_was() -> None:
    async with bench(PREFILL, DECODE, router=one_at_a_time(max_waiting=1000)) as running:

        async def come_and_go(index: int) -> None:
            call = running.stub.Generate(request(20))
            await asyncio.sleep(index % 10 / 100)
            call.cancel()

        await asyncio.gather(*(come_and_go(index) for index in range(100)))
        await run(running)
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_new_worker_takes_what_waits_at_once() -> None:
    async with bench(PREFILL, DECODE, router=one_at_a_time()) as running:
        inside = await occupy(running, tokens=4000)
        other = asyncio.create_task(run(running))
        await waiting(1)
        await running.start(simulated("d2", "decode", decode_step_seconds=0.01))
        await other
        assert not inside.done()
        inside.cancel()


async def test_while_the_only_worker_is_away_requests_wait_for_the_next_one() -> None:
    async with bench(PREFILL, DECODE, router=one_at_a_time()) as running:
        inside = await occupy(running, tokens=4000)
        others = [asyncio.create_task(run(running)) for _ in range(3)]
        await waiting(3)
        await running.stop("d1")
        await running.ready(1)
        with pytest.raises(aio.AioRpcError, match="UNAVAILABLE"):
            await read_to_end(inside)
        await running.start(simulated("d2", "decode", decode_step_seconds=0.01))
        await asyncio.gather(*others)


async def test_an_outage_that_lasts_is_unavailable() -> None:
    config = router(AdmissionConfig(max_running_per_worker=1, outage_seconds=0.2))
    async with bench(PREFILL, DECODE, router=config) as running:
        await running.stop("d1")
        await running.ready(1)
        for _ in range(2):
            assert reason(await refusal(running)) == ("UNAVAILABLE", "NO_WORKER")


@pytest.mark.parametrize("priority", ["11", "-11", "high", "1.5", "+1", "--1"])
async def test_a_priority_that_is_none_is_invalid(priority: str) -> None:
    async with bench(PREFILL, DECODE) as running:
        error = await refusal(running, priority=priority)
        assert reason(error) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert "x-baton-priority" in str(error.details())


# Tenants.


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


# Deadlines.


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


async def test_a_prompt_that_waits_in_a_worker_s_queue_past_its_deadline_is_never_computed() -> None:
    config = router(AdmissionConfig(predict_deadlines=False))
    busy = simulated("p1", "prefill", prefill_base_seconds=0.5, max_batch=1)
    async with bench(busy, DECODE, router=config) as running:
        engine = running.workers["p1"].engine
        first = asyncio.create_task(run(running, prompt="a" * 64))
        await eventually(lambda: engine.load().running == 1)
        error = await refusal(running, prompt="b" * 64, timeout=0.2)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: engine.load().waiting == 0)
        await first
        assert engine.load().running == 0
        assert running.used_blocks() == 0


async def test_tenant_and_priority_travel_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.prefill import PrefillServicer

    seen: list[Sequence[tuple[str, str]]] = []
    prefill = PrefillServicer.Prefill

    async def noting(self: PrefillServicer, request: object, context: object) -> object:
        metadata = context.invocation_metadata()  # type: ignore[attr-defined]
        seen.append([(key, value) for key, value in metadata if key in (TENANT_KEY, PRIORITY_KEY)])
        return await prefill(self, request, context)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefillServicer, "Prefill", noting)
    async with bench(PREFILL, DECODE) as running:
        await run(running, tenant="acme", priority=-3)
        await run(running)
    assert seen == [[("x-baton-tenant", "acme"), ("x-baton-priority", "-3")], []]


async def test_a_client_that_reads_nothing_is_ended_with_a_reason() -> None:
    limits = LimitsConfig(slow_reader_seconds=0.3, max_waiting_tokens=64)
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with (
        bench(PREFILL, simulated("d1", "decode"), router=FAST_ROUTER.model_copy(update={"limits": limits})) as running,
        aio.insecure_channel(running.address, narrow) as channel,
    ):
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        long = request(tokens=8000)
        long.response.logprobs = 20
        call = stub.Generate(long)
        await eventually(lambda: running.used_blocks() > 0)
        await eventually(lambda: running.used_blocks() == 0)
        with pytest.raises(aio.AioRpcError) as caught:
            _ = [message async for message in call]
        assert reason(caught.value) == ("RESOURCE_EXHAUSTED", "SLOW_READER")
