"""Workers that are lost, hang, or do not fit: where requests continue, and what clients notice."""

import asyncio
import re
import time
from contextlib import aclosing

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.scraping import sample
from support.cluster.in_process import (
    DECODE,
    FAST_ROUTER,
    PREFILL,
    Bench,
    Stream,
    bench,
    running_stream,
    simulated,
)
from support.eventually import eventually
from support.faults.outcomes import Outcome

from baton.inference.v1 import cluster_service_pb2, generate_pb2, inference_service_pb2_grpc
from router.config import LimitsConfig, ProbeConfig, RetryConfig
from rpc.channels import open_channel

SEEDED = {"temperature": 1.0, "seed": 3}
STEP = 0.01
QUICK_TO_SEE_A_HANG = FAST_ROUTER.model_copy(
    update={"probe": ProbeConfig(interval_seconds=0.1, timeout_seconds=0.3, hung_seconds=0.6)}
)
LONG = {"prompt": "hello", "sampling": SEEDED, "stopping": {"max_tokens": 60}}


@pytest.mark.feature("recovery from a lost prefill worker", engine="simulated", facade="grpc")
async def test_a_lost_prefill_is_run_again_elsewhere(undisturbed: Stream) -> None:
    slow = [simulated(name, "prefill", prefill_base_seconds=0.3) for name in ("p1", "p2")]
    async with bench(*slow, DECODE) as running:
        async with running_stream(running, 0, **LONG) as task:
            await eventually(lambda: any(worker.engines.load().running for worker in running.workers.values()))
            lost = next(name for name, worker in running.workers.items() if worker.engines.load().running)
            await running.proxies[lost].cut()
            stream = await task
        assert stream.finished.prefill_worker_id == {"p1": "p2", "p2": "p1"}[lost]
        assert stream.finished.migrations == 1
        assert stream.token_ids == undisturbed.token_ids


@pytest.mark.feature("recovery from a lost decode worker", engine="simulated", facade="grpc")
async def test_a_lost_decode_goes_on_elsewhere_with_the_same_ids(undisturbed: Stream) -> None:
    slow = [simulated(name, "decode", decode_step_seconds=STEP) for name in ("d1", "d2")]
    async with bench(PREFILL, *slow) as running:
        async with running_stream(running, 10, **LONG) as task:
            lost = next(name for name in ("d1", "d2") if running.workers[name].engine.load().running)
            await running.proxies[lost].cut()
            stream = await task
        assert stream.finished.decode_worker_id == {"d1": "d2", "d2": "d1"}[lost]
        assert stream.finished.migrations == 1
        expected = undisturbed
        assert stream.token_ids == expected.token_ids
        assert stream.text == expected.text
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_decode_worker_that_drains_hands_its_streams_on(undisturbed: Stream) -> None:
    slow = [simulated(name, "decode", decode_step_seconds=STEP) for name in ("d1", "d2")]
    async with bench(PREFILL, *slow) as running:
        async with running_stream(running, 10, **LONG) as task:
            await running.stop(next(name for name in ("d1", "d2") if running.workers[name].engine.load().running))
            stream = await task
        assert stream.token_ids == undisturbed.token_ids


async def test_a_stop_string_over_a_migration_is_found(undisturbed: Stream) -> None:
    text = undisturbed.text
    stop = text[9:14]
    slow = [simulated(name, "decode", decode_step_seconds=STEP) for name in ("d1", "d2")]
    async with bench(PREFILL, *slow) as running:
        stopping = {"max_tokens": 60, "stop": [stop]}
        async with running_stream(running, 11, prompt="hello", sampling=SEEDED, stopping=stopping) as task:
            await running.proxies[next(n for n in ("d1", "d2") if running.workers[n].engine.load().running)].cut()
            stream = await task
        assert stream.text == text[: text.index(stop)]
        assert stream.finished.stop_string == stop


async def test_an_answer_waits_for_a_worker_that_comes_back(undisturbed: Stream) -> None:
    slow = simulated("d1", "decode", decode_step_seconds=STEP)
    patient = FAST_ROUTER.model_copy(update={"retry": RetryConfig(wait_seconds=10)})
    async with bench(PREFILL, slow, router=patient) as running:
        async with running_stream(running, 10, **LONG) as task:
            await running.stop("d1")
            await asyncio.sleep(0.3)
            assert not task.done()
            await running.start(slow)
            stream = await task
        assert stream.finished.migrations == 1
        assert stream.token_ids == undisturbed.token_ids


async def test_without_another_decode_worker_the_error_is_the_lost_workers() -> None:
    async with bench(PREFILL, simulated("d1", "decode", decode_step_seconds=STEP)) as running:
        async with running_stream(running, 5, **LONG) as task:
            await running.proxies["d1"].cut()
            with pytest.raises(aio.AioRpcError) as caught:
                await task
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await eventually(lambda: running.used_blocks() == 0)


async def test_without_another_prefill_worker_the_decode_worker_runs_it_all(undisturbed: Stream) -> None:
    async with bench(simulated("p1", "prefill", prefill_base_seconds=0.5), DECODE) as running:
        async with running_stream(running, 0, **LONG) as task:
            await eventually(lambda: running.workers["p1"].engine.load().running > 0)
            await running.proxies["p1"].cut()
            stream = await task
        assert stream.placed == ("", "d1")
        assert stream.finished.topology == generate_pb2.TOPOLOGY_AGGREGATED
        assert stream.token_ids == undisturbed.token_ids


async def test_attempts_are_bounded() -> None:
    once = FAST_ROUTER.model_copy(update={"retry": RetryConfig(max_attempts=1, wait_seconds=0)})
    slow = [simulated(name, "prefill", prefill_base_seconds=0.5) for name in ("p1", "p2")]
    async with bench(*slow, DECODE, router=once) as running:
        async with running_stream(running, 0, **LONG) as task:
            await eventually(lambda: any(worker.engines.load().running for worker in running.workers.values()))
            await running.proxies[next(n for n, w in running.workers.items() if w.engine.load().running)].cut()
            with pytest.raises(aio.AioRpcError) as caught:
                await task
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_request_that_wants_disaggregation_is_refused_where_there_is_none(pair: Bench) -> None:
    await pair.stop("p1")
    await pair.ready(1)
    with pytest.raises(aio.AioRpcError) as caught:
        await pair.generate(prompt="x", routing={"topology": "TOPOLOGY_DISAGGREGATED"})
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "d1: has no prefill role" in str(caught.value.details())


async def test_workers_whose_layouts_differ_are_never_paired() -> None:
    async with bench(simulated("p1", "prefill", block_tokens=32), DECODE) as running:
        for _ in range(4):
            stream = await running.generate(prompt="hello", stopping={"max_tokens": 4})
            assert stream.placed == ("", "d1")
        outcome = await refused(running)
        assert outcome.label == "FAILED_PRECONDITION/KV_LAYOUT_MISMATCH"
        assert re.search(
            r"prefill p1 has \w{12} \(.*32 tokens a block.*; decode d1 .* 16 tokens a block", outcome.message
        )


async def refused(running: Bench) -> Outcome:
    """The refusal of a request that must run disaggregated."""
    outcome = Outcome("refused")
    with pytest.raises(aio.AioRpcError) as caught:
        await running.generate(prompt="x", routing={"topology": "TOPOLOGY_DISAGGREGATED"})
    outcome.end(caught.value)
    return outcome


async def test_a_pair_of_equal_layouts_that_is_not_ready_is_waited_for() -> None:
    """The refusal of differing layouts is final; here it would be wrong a second later."""
    async with bench(PREFILL, simulated("p2", "prefill", block_tokens=32), DECODE) as running:
        running.proxies["p1"].freeze()
        await eventually(lambda: any(worker.problem for worker in running.cluster.workers))
        outcome = await refused(running)
        assert outcome.label == "UNAVAILABLE/NO_WORKER"
        assert re.search(
            r"p2: its KV layout, .* 32 tokens a block.*, differs from .* 16 tokens a block", outcome.message
        )


async def test_a_worker_of_both_roles_is_no_pair_with_itself() -> None:
    async with bench(simulated("w1", "prefill", "decode")) as running:
        assert (await refused(running)).label == "UNAVAILABLE/NO_WORKER"
        await running.start(simulated("w2", "prefill", "decode", block_tokens=32))
        await running.ready(2)
        assert (await refused(running)).label == "FAILED_PRECONDITION/KV_LAYOUT_MISMATCH"


async def test_workers_without_a_common_transport_are_never_paired() -> None:
    """Before, each request began with a pull that could not succeed, and its prompt was run twice."""
    prefill = simulated("p1", "prefill").model_copy(update={"transports": ("shm",)})
    decode = simulated("d1", "decode").model_copy(update={"transports": ("tcp",)})
    async with bench(prefill, decode) as running:
        for _ in range(4):
            stream = await running.generate(**LONG)
            assert stream.placed == ("", "d1")
        with pytest.raises(aio.AioRpcError, match="it offers shm, and read are tcp") as caught:
            await running.generate(**LONG, routing={"topology": "TOPOLOGY_DISAGGREGATED"})
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_without_a_ready_worker_the_reasons_are_told(pair: Bench) -> None:
    pair.proxies["d1"].freeze()
    await eventually(lambda: any(worker.problem for worker in pair.cluster.workers))
    with pytest.raises(aio.AioRpcError) as caught:
        await pair.generate(prompt="x")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "d1: its health check failed" in str(caught.value.details())
    assert "p1: has no decode role" in str(caught.value.details())


async def test_a_worker_that_hangs_is_left_out_within_the_probe_period_and_comes_back() -> None:
    async with bench(PREFILL, simulated("d1", "decode"), simulated("d2", "decode")) as running:
        running.proxies["d1"].freeze()
        start = asyncio.get_running_loop().time()
        await eventually(lambda: any(worker.problem for worker in running.cluster.workers))
        assert asyncio.get_running_loop().time() - start < 10
        for _ in range(4):
            assert (await running.generate(prompt="x", stopping={"max_tokens": 3})).placed == ("p1", "d2")
        states = {worker.worker_id: worker.state for worker in await running.list_workers()}
        assert states["d1"] == cluster_service_pb2.WORKER_STATE_UNHEALTHY
        await running.proxies["d1"].restore()
        await running.ready(3)


async def test_a_router_that_stood_still_does_not_blame_a_worker() -> None:
    probe = ProbeConfig(interval_seconds=0.1, timeout_seconds=1.0)
    async with bench(PREFILL, DECODE, router=FAST_ROUTER.model_copy(update={"probe": probe})) as running:
        [worker] = [one for one in running.cluster.workers if one.record.worker_id == "d1"]
        # A check is on its way while this whole process stands still, for longer than one may take, but not for the 3 s
        # within which gRPC wants its pings answered: the proxies, which would pass them on, stand still as well.
        running.proxies["d1"].freeze()
        await asyncio.sleep(2 * probe.interval_seconds)
        time.sleep(2 * probe.timeout_seconds)  # noqa: ASYNC251
        await running.proxies["d1"].restore()
        until = time.monotonic() + 5 * probe.interval_seconds
        while time.monotonic() < until:
            assert worker.problem == ""
            await asyncio.sleep(0)  # sees it even if it is soon taken back


async def test_a_decode_that_hangs_goes_on_elsewhere(undisturbed: Stream) -> None:
    slow = [simulated(name, "decode", decode_step_seconds=STEP) for name in ("d1", "d2")]
    async with bench(PREFILL, *slow, router=QUICK_TO_SEE_A_HANG) as running:
        async with running_stream(running, 10, **LONG) as task:
            hung = next(name for name in ("d1", "d2") if running.workers[name].engine.load().running)
            running.proxies[hung].freeze()
            start = asyncio.get_running_loop().time()
            stream = await task
        assert asyncio.get_running_loop().time() - start < 20
        assert stream.finished.decode_worker_id == {"d1": "d2", "d2": "d1"}[hung]
        assert stream.finished.migrations == 1
        assert stream.token_ids == undisturbed.token_ids


async def test_a_prefill_that_hangs_is_run_again_elsewhere(undisturbed: Stream) -> None:
    slow = [simulated(name, "prefill", prefill_base_seconds=0.3) for name in ("p1", "p2")]
    async with bench(*slow, DECODE, router=QUICK_TO_SEE_A_HANG) as running:
        async with running_stream(running, 0, **LONG) as task:
            await eventually(lambda: any(worker.engines.load().running for worker in running.workers.values()))
            hung = next(name for name, worker in running.workers.items() if worker.engines.load().running)
            running.proxies[hung].freeze()
            stream = await task
        assert stream.finished.prefill_worker_id == {"p1": "p2", "p2": "p1"}[hung]
        assert stream.token_ids == undisturbed.token_ids


async def test_a_stream_outlives_the_restart_of_every_decode_worker_under_its_old_id(undisturbed: Stream) -> None:
    slow = [simulated(name, "decode", decode_step_seconds=3 * STEP) for name in ("d1", "d2")]
    async with bench(PREFILL, *slow) as running:
        async with running_stream(running, 5, **LONG) as task:
            for _ in range(4):
                await eventually(lambda: any(running.workers[name].engine.load().running for name in ("d1", "d2")))
                name = next(name for name in ("d1", "d2") if running.workers[name].engine.load().running)
                async with aclosing(running.workers[name].drainer.drain(0)) as stages:
                    assert [progress.drained async for progress in stages][-1]
                other = running.workers[{"d1": "d2", "d2": "d1"}[name]]
                await eventually(lambda other=other: other.engine.load().running == 1)
                await running.stop(name)
                await running.start(simulated(name, "decode", decode_step_seconds=3 * STEP))
                await running.ready(3)
            stream = await task
        # A worker that drains at once stops it, unless it was moved before.
        assert stream.finished.migrations + stream.finished.moves == 4
        assert stream.token_ids == undisturbed.token_ids


async def test_a_request_that_must_run_disaggregated_is_not_continued_otherwise() -> None:
    slow = [simulated(name, "decode", decode_step_seconds=STEP) for name in ("d1", "d2")]
    async with bench(PREFILL, *slow) as running:
        apart = {**LONG, "routing": {"topology": "TOPOLOGY_DISAGGREGATED"}}
        async with running_stream(running, 10, **apart) as task:
            await running.proxies[next(n for n in ("d1", "d2") if running.workers[n].engine.load().running)].cut()
            with pytest.raises(aio.AioRpcError, match="disaggregated request cannot continue") as caught:
                await task
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_worker_that_comes_later_is_used(pair: Bench) -> None:
    await pair.start(simulated("d2", "decode"))
    await pair.ready(3)
    placed = {(await pair.generate(prompt="x", stopping={"max_tokens": 2})).placed for _ in range(4)}
    assert placed == {("p1", "d1"), ("p1", "d2")}


@pytest.mark.feature("deadlines", engine="simulated", facade="grpc")
async def test_the_deadline_stops_a_request_and_names_the_stage() -> None:
    short = FAST_ROUTER.model_copy(update={"limits": LimitsConfig(request_timeout_seconds=1.5)})
    async with bench(PREFILL, simulated("d1", "decode", decode_step_seconds=0.05), router=short) as running:
        call = running.stub.Generate(generate_pb2.GenerateRequest(**LONG))
        with pytest.raises(aio.AioRpcError) as caught:
            _ = [message async for message in call]
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.details() == "the deadline passed during decode"
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_clients_deadline_counts_up_to_the_routers_limit() -> None:
    short = FAST_ROUTER.model_copy(update={"limits": LimitsConfig(max_timeout_seconds=1.5)})
    async with bench(PREFILL, simulated("d1", "decode", decode_step_seconds=0.05), router=short) as running:
        call = running.stub.Generate(generate_pb2.GenerateRequest(**LONG), timeout=60)
        with pytest.raises(aio.AioRpcError) as caught:
            _ = [message async for message in call]
        assert caught.value.details() == "the deadline passed during decode"
        await eventually(lambda: running.used_blocks() == 0)


async def test_the_router_is_serving_only_while_a_decode_worker_is_ready(pair: Bench) -> None:
    async with open_channel(pair.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="baton.inference.v1.InferenceService"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await pair.stop("d1")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await pair.start(DECODE)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_client_that_never_reads_is_given_up_at_its_deadline() -> None:
    limits = LimitsConfig(request_timeout_seconds=1.0, max_waiting_tokens=64)
    short = FAST_ROUTER.model_copy(update={"limits": limits})
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with (
        bench(PREFILL, DECODE, router=short) as running,
        aio.insecure_channel(running.address, narrow) as channel,
    ):
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        request = {"prompt": "hello", "stopping": {"max_tokens": 8000}, "response": {"logprobs": 20}}
        call = stub.Generate(generate_pb2.GenerateRequest(**request))
        await eventually(lambda: running.used_blocks() > 0)
        await eventually(lambda: running.used_blocks() == 0)
        await eventually(lambda: sample("baton_router_running_requests") == 0)
        with pytest.raises(aio.AioRpcError) as caught:
            _ = [message async for message in call]
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert await running.text_of(prompt="x", stopping={"max_tokens": 3})
