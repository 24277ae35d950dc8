"""Admission control: the queue and its priorities."""

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from grpc import aio
from support.cluster.in_process import FAST_ROUTER, bench, simulated
from support.eventually import eventually
from support.router.admission import (
    DECODE,
    PREFILL,
    occupy,
    one_at_a_time,
    read_to_end,
    reason,
    refusal,
    request,
    retry_seconds,
    router,
    run,
    waiting,
)

from baton.connection.credentials import PRIORITY_KEY, TENANT_KEY
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from router.config import AdmissionConfig, LimitsConfig


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
    from services.roles.prefill import PrefillServicer

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
