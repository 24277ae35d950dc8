"""Every outcome of a request, provoked in a real cluster: its trace is complete and has the outcome."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from support.cluster.in_process import DECODE, PREFILL, simulated
from support.cluster.traced import Traced, generated, to_the_end, tokens, traced
from support.eventually import eventually
from support.images.simulated_workers import about, leasing, multimodal

from baton.inference.v1 import generate_pb2 as pb
from devtools.trace_viewer import reading
from devtools.trace_viewer.contract import Verdict, verify
from devtools.trace_viewer.reading import read
from router.config import AdmissionConfig, MovingConfig, QuotaConfig, QuotasConfig
from services.config import HandoffConfig

LONG = pb.GenerateRequest(prompt="hello", request_id="r-1", stopping={"max_tokens": 200})
# Of requests that are only there to be in the way.
UNTRACED = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"),)
SLOW_PREFILL = simulated("p1", "prefill", prefill_base_seconds=10.0)
SLOW_DECODE = simulated("d1", "decode", decode_step_seconds=0.01)


async def test_ok() -> None:
    async with traced(PREFILL, DECODE) as cluster:
        verdict = await generated(cluster, prompt="hello", stopping={"max_tokens": 4})
    assert verdict == Verdict("ok", ())


async def test_a_handoff_says_how_much_it_moved_and_how() -> None:
    async with traced(PREFILL, DECODE) as cluster:
        await generated(cluster, prompt="x" * 40, stopping={"max_tokens": 4})
        (handoff,) = cluster.trace().named("handoff")
    assert handoff.attributes["baton.handoff.blocks"] == 3
    assert handoff.attributes["baton.handoff.bytes"] == 3 * 4096
    assert handoff.attributes["baton.handoff.transport"] == "shm"
    assert handoff.attributes["baton.handoff.gigabytes_per_second"] > 0


async def test_the_span_for_clients_follows_the_conventions_for_generative_ai() -> None:
    async with traced(PREFILL, DECODE) as cluster:
        sampling = {"temperature": 0.7, "top_k": 5}
        await generated(cluster, prompt="hello", request_id="r-1", sampling=sampling, stopping={"max_tokens": 4})
        (generate,) = cluster.trace().named("baton.generate")
    said = {key: value for key, value in generate.attributes.items() if key.startswith("gen_ai.")}
    assert 0 < said.pop("gen_ai.response.time_to_first_chunk") < 5
    assert said == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": "demo",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": "r-1",
        "gen_ai.response.finish_reasons": '["length"]',
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }


async def test_ok_with_encode() -> None:
    async with traced(multimodal("e1", "encode"), multimodal("p1", "prefill"), multimodal("d1", "decode")) as cluster:
        assert await generated(cluster, **about()) == Verdict("ok with encode", ())


async def test_ok_aggregated() -> None:
    async with traced(DECODE) as cluster:
        verdict = await generated(cluster, prompt="hello", stopping={"max_tokens": 4})
    assert verdict == Verdict("ok, aggregated", ())


async def test_ok_with_a_first_token_that_is_the_last() -> None:
    async with traced(PREFILL, DECODE) as cluster:
        verdict = await generated(cluster, prompt="hello", stopping={"max_tokens": 1})
    assert verdict == Verdict("ok", ())


async def test_refused_for_its_fields() -> None:
    async with traced(PREFILL, DECODE) as cluster:
        assert await generated(cluster, prompt="") == Verdict("refused: INVALID_REQUEST", ())


async def test_refused_for_want_of_workers() -> None:
    async with traced(DECODE) as cluster:
        routing = {"topology": pb.TOPOLOGY_DISAGGREGATED}
        assert await generated(cluster, prompt="hello", routing=routing) == Verdict("refused: NO_WORKER", ())


async def test_refused_for_a_quota() -> None:
    quotas = QuotasConfig(default=QuotaConfig(tokens_per_second=0.1, burst_seconds=10))
    async with traced(PREFILL, DECODE, quotas=quotas) as cluster:
        await to_the_end(cluster.running.stub.Generate(LONG, metadata=UNTRACED))
        assert await generated(cluster, prompt="hello") == Verdict("refused: QUOTA_EXCEEDED", ())
        assert [span.outcome for span in cluster.trace().named("admission")] == ["OK", "QUOTA_EXCEEDED"]


async def test_refused_since_others_of_its_tenant_run() -> None:
    quotas = QuotasConfig(default=QuotaConfig(concurrent=1))
    async with traced(PREFILL, SLOW_DECODE, quotas=quotas) as cluster:
        first = cluster.running.stub.Generate(LONG, metadata=UNTRACED)
        await tokens(first, 2)
        assert await generated(cluster, prompt="hello") == Verdict("refused: QUOTA_EXCEEDED", ())
        first.cancel()


async def test_refused_since_too_many_wait() -> None:
    admission = AdmissionConfig(max_running_per_worker=1, max_waiting=0)
    async with traced(PREFILL, SLOW_DECODE, admission=admission) as cluster:
        first = cluster.running.stub.Generate(LONG, metadata=UNTRACED)
        await tokens(first, 2)
        assert await generated(cluster, prompt="hello") == Verdict("refused: OVERLOADED", ())
        first.cancel()


async def test_refused_before_it_is_a_request_at_all() -> None:
    async with traced(PREFILL, DECODE, allow_faults=False) as cluster:
        await to_the_end(cluster.running.stub.Generate(LONG, metadata=(("x-baton-fault", "crash@decode"),)))
        await eventually(lambda: len(cluster.viewer.store) == 1)
        (trace,) = cluster.viewer.store.newest_first()
        assert verify(read(reading.trace(trace))) == Verdict("refused: PERMISSION_DENIED", ())


async def test_ok_with_an_embedding_that_was_pulled() -> None:
    async with traced(leasing("e1", "encode"), multimodal("p1", "prefill"), multimodal("d1", "decode")) as cluster:
        assert await generated(cluster, **about()) == Verdict("ok with encode", ())
        (pulled,) = cluster.trace().named("embedding")
    assert (pulled.attributes["baton.embedding.transport"], pulled.attributes["baton.embedding.bytes"]) == ("shm", 1024)


async def test_an_encode_that_is_lost_is_run_elsewhere() -> None:
    encoders = [multimodal(name, "encode", allow_faults=True) for name in ("e1", "e2")]
    others = [multimodal(name, role, allow_faults=True) for name, role in (("p1", "prefill"), ("d1", "decode"))]
    async with traced(*encoders, *others) as cluster:
        assert await generated(cluster, plan="drop@encode", **about()) == Verdict("ok, encode lost", ())
        assert sorted(span.outcome for span in cluster.trace().named("encode")) == ["OK", "WORKER_UNAVAILABLE"]


async def test_an_encode_that_fails_for_good() -> None:
    workers = [multimodal(name, role, allow_faults=True) for name, role in (("e1", "encode"), ("p1", "prefill"))]
    async with traced(*workers, multimodal("d1", "decode", allow_faults=True)) as cluster:
        verdict = await generated(cluster, plan="drop@encode;attempt=any", **about())
        assert verdict == Verdict("failed: WORKER_UNAVAILABLE", ())
        (generate,) = cluster.trace().named("baton.generate")
    assert generate.attributes["baton.error.stage"] == "encode"


async def test_a_handoff_whose_lease_expires() -> None:
    short = HandoffConfig(lease_seconds=0.3)
    workers = [simulated(name, role, allow_faults=True) for name, role in (("p1", "prefill"), ("d1", "decode"))]
    async with traced(*(worker.model_copy(update={"handoff": short}) for worker in workers)) as cluster:
        verdict = await generated(cluster, plan="delay=1@queue;role=decode", prompt="hello", stopping={"max_tokens": 4})
        assert verdict == Verdict("ok, handoff lost", ())
        assert [span.attributes["baton.handoff.confirmed"] for span in cluster.trace().named("handoff")] == [False]


async def test_a_prefill_worker_that_drains() -> None:
    slow = [simulated(name, "prefill", prefill_base_seconds=0.4) for name in ("p1", "p2")]
    async with traced(*slow, DECODE) as cluster:
        task = asyncio.create_task(generated(cluster, prompt="hello", stopping={"max_tokens": 4}))
        drained = cluster.running.workers[await busy(cluster, "p1", "p2")].drainer
        async with aclosing(drained.drain(0.0)) as stages:
            async for _ in stages:
                pass
        assert await task == Verdict("ok, drained", ())


async def test_spans_say_which_process_made_them() -> None:
    async with traced(PREFILL, DECODE) as cluster:
        await generated(cluster, prompt="hello", stopping={"max_tokens": 4})
        (trace,) = cluster.viewer.store.newest_first()
    said = {
        process["serviceName"]: [tag["value"] for tag in process["tags"] if tag["key"] == "service.instance.id"]
        for process in reading.trace(trace)["processes"].values()
    }
    assert said == {"baton-router": ["r1"], "baton-prefill": ["p1"], "baton-decode": ["d1"]}


async def test_what_the_client_is_told_is_what_the_span_says() -> None:
    async with traced(PREFILL, DECODE) as cluster:
        finished = (await cluster.running.generate(prompt="hello", stopping={"max_tokens": 4})).finished
        assert await cluster.verdict() == Verdict("ok", ())
        (generate,) = cluster.trace().named("baton.generate")
    first = sum(timing.before_first_token.ToNanoseconds() for timing in finished.timings)
    assert generate.attributes["gen_ai.response.time_to_first_chunk"] * 1e9 == pytest.approx(first, abs=1)


Stop = Callable[[Traced, Any], Awaitable[None]]


async def by_request(cluster: Traced, call: Any) -> None:
    await cluster.running.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="r-1"))


async def by_leaving(cluster: Traced, call: Any) -> None:
    call.cancel()


@pytest.mark.parametrize(("stop", "name"), [(by_request, "cancelled"), (by_leaving, "client gone")])
async def test_stopped_before_its_first_token(stop: Stop, name: str) -> None:
    async with traced(SLOW_PREFILL, DECODE) as cluster:
        call = cluster.running.stub.Generate(LONG)
        await eventually(lambda: cluster.running.workers["p1"].engine.load().running > 0)
        await stop(cluster, call)
        await to_the_end(call)
        assert await cluster.verdict() == Verdict(f"{name} before first token", ())


@pytest.mark.parametrize(("stop", "name"), [(by_request, "cancelled"), (by_leaving, "client gone")])
async def test_stopped_after_its_first_token(stop: Stop, name: str) -> None:
    async with traced(PREFILL, SLOW_DECODE) as cluster:
        call = cluster.running.stub.Generate(LONG)
        await tokens(call, 5)
        await stop(cluster, call)
        await to_the_end(call)
        assert await cluster.verdict() == Verdict(f"{name} after first token", ())


async def test_deadline_exceeded() -> None:
    async with traced(PREFILL, SLOW_DECODE) as cluster:
        await to_the_end(cluster.running.stub.Generate(LONG, timeout=1.5))
        assert await cluster.verdict() == Verdict("deadline exceeded", ())


async def test_a_prefill_that_is_lost_is_run_elsewhere() -> None:
    slow = [simulated(name, "prefill", prefill_base_seconds=0.4) for name in ("p1", "p2")]
    async with traced(*slow, DECODE) as cluster:
        task = asyncio.create_task(generated(cluster, prompt="hello", stopping={"max_tokens": 4}))
        await cut(cluster, "p1", "p2")
        assert await task == Verdict("ok, prefill lost", ())
        first, second = cluster.trace().named("prefill")
    assert (first.is_error, second.is_error) == (True, False)


async def test_a_decode_that_is_lost_goes_on_elsewhere() -> None:
    slow = [simulated(name, "decode", decode_step_seconds=0.02) for name in ("d1", "d2")]
    async with traced(PREFILL, *slow) as cluster:
        task = asyncio.create_task(generated(cluster, prompt="hello", stopping={"max_tokens": 40}))
        await cut(cluster, "d1", "d2")
        assert await task == Verdict("ok, decode lost", ())
        (generate,) = cluster.trace().named("baton.generate")
    assert generate.attributes["baton.migrations"] == 1


async def test_a_decode_that_is_lost_for_good_fails() -> None:
    async with traced(PREFILL, SLOW_DECODE) as cluster:
        task = asyncio.create_task(generated(cluster, prompt="hello", stopping={"max_tokens": 200}))
        await cut(cluster, "d1")
        verdict = await task
    assert verdict == Verdict("failed: WORKER_UNAVAILABLE", ())


async def test_a_decode_worker_that_drains() -> None:
    slow = [simulated(name, "decode", decode_step_seconds=0.02) for name in ("d1", "d2")]
    # Otherwise the router may hear of the drain in time to move the stream, which is then not lost.
    async with traced(PREFILL, *slow, moving=MovingConfig(at_once=0)) as cluster:
        task = asyncio.create_task(generated(cluster, prompt="hello", stopping={"max_tokens": 40}))
        drained = cluster.running.workers[await busy(cluster, "d1", "d2")].drainer
        async with aclosing(drained.drain(0.0)) as stages:
            async for _ in stages:
                pass
        assert await task == Verdict("ok, drained", ())


async def test_a_handoff_that_is_lost() -> None:
    # The decode worker has no room: the second handoff waits there until its owner takes it back.
    full = SLOW_DECODE.model_copy(update={"engine": SLOW_DECODE.engine.model_copy(update={"num_blocks": 2})})
    async with traced(PREFILL, full) as cluster:
        first = cluster.running.stub.Generate(
            pb.GenerateRequest(prompt="x" * 16, stopping={"max_tokens": 15}), metadata=UNTRACED
        )
        await tokens(first, 2)
        task = asyncio.create_task(generated(cluster, prompt="y" * 16, request_id="r-1", stopping={"max_tokens": 4}))
        leases = cluster.running.workers["p1"].leases
        await eventually(lambda: bool(leases.held))
        await leases.release_all()
        assert await task == Verdict("ok, handoff lost", ())
        first.cancel()


async def busy(cluster: Traced, *names: str) -> str:
    """The worker of these that runs the request, once one does."""
    workers = cluster.running.workers
    await eventually(lambda: any(workers[name].engine.load().running for name in names))
    return next(name for name in names if workers[name].engine.load().running)


async def cut(cluster: Traced, *names: str) -> None:
    """Cuts the way to the worker that runs the request."""
    await cluster.running.proxies[await busy(cluster, *names)].cut()
