"""InferenceService.Embed through a router: vectors in order, limits, load, failures."""

import asyncio
import math
from typing import Any

import grpc
import pytest
from grpc import aio
from structlog.testing import capture_logs
from support.clients.scraping import since
from support.cluster.in_process import DECODE, FAST_ROUTER, Bench, bench, simulated
from support.eventually import eventually
from support.log_fields import merge_log_fields

from baton.calls import unary
from baton.engine.v1 import embed_pb2 as engine_pb2
from baton.engine.v1 import embed_pb2_grpc
from baton.errors import BatonError
from baton.inference.v1 import embed_pb2, generate_pb2, model_pb2, timing_pb2
from router.config import AdmissionConfig, LimitsConfig, QuotaConfig, QuotasConfig
from router.embedding.pipeline import VectorRoom
from runtime.aio import timeout as time_limit

E1, E2 = simulated("e1", "embed"), simulated("e2", "embed")


async def embed(running: Bench, *texts: str, timeout: float = 20, **fields: Any) -> embed_pb2.EmbedResponse:
    """One call, whose failure is a BatonError."""
    request = embed_pb2.EmbedRequest(inputs=[{"text": text} for text in texts], **fields)
    return await unary(running.stub.Embed(request, timeout=timeout))


def violations(error: BatonError) -> list[str]:
    return [one.field for one in getattr(error, "violations", ())]


@pytest.mark.feature("embeddings of texts", engine="simulated", facade="grpc")
async def test_each_input_gets_its_vector_in_order_and_the_usage_counts_their_tokens() -> None:
    async with bench(E1) as running:
        both = await embed(running, "one", "another")
        alone = await embed(running, "another")
    assert list(both.embeddings[1].values) == list(alone.embeddings[0].values) != list(both.embeddings[0].values)
    assert [one.num_tokens for one in both.embeddings] == [3, 7]
    assert (both.usage.prompt_tokens, both.model, len(both.embeddings[0].values)) == (10, "demo", 64)
    assert both.request_id
    assert timing_pb2.STAGE_EMBED in [timing.stage for timing in both.timings]


async def test_token_ids_give_the_vector_of_their_text() -> None:
    async with bench(E1) as running:
        request = embed_pb2.EmbedRequest(inputs=[{"text": "ab"}, {"token_ids": {"ids": list(b"ab")}}])
        response = await unary(running.stub.Embed(request, timeout=60))
    assert response.embeddings[0] == response.embeddings[1]


async def test_vectors_are_shortened_first_and_then_have_the_length_1() -> None:
    async with bench(E1) as running:
        raw = await embed(running, "x", normalize=False)
        short = await embed(running, "x", dimensions=5)
    beginning = list(raw.embeddings[0].values)[:5]
    length = math.hypot(*beginning)
    assert list(short.embeddings[0].values) == pytest.approx([value / length for value in beginning], rel=1e-5)


async def test_wrong_fields_are_all_named_before_a_worker_is_called() -> None:
    async with bench(simulated("e1", "embed", max_context_tokens=8)) as running:
        with pytest.raises(BatonError) as caught:
            await embed(running, "fine", "fine", "x" * 10_000, "", dimensions=65)
        with pytest.raises(BatonError, match="23 tokens of at most 8") as of_tokens:
            await embed(running, "fine", "fine", "a text that is too long")
        ids = [{"token_ids": {"ids": [1, 10**6]}}, {"token_ids": {"ids": range(9)}}, {}]
        with pytest.raises(BatonError) as of_ids:
            await unary(running.stub.Embed(embed_pb2.EmbedRequest(inputs=ids), timeout=60))
        with pytest.raises(BatonError) as of_none:
            await embed(running)
    assert sorted(violations(caught.value)) == ["dimensions", "inputs[2]", "inputs[3]"]
    assert violations(of_tokens.value) == ["inputs[2]"]
    assert violations(of_ids.value) == ["inputs[0].token_ids.ids[1]", "inputs[1]", "inputs[2]"]
    assert violations(of_none.value) == ["inputs"]
    assert (caught.value.worker_id, of_ids.value.worker_id) == ("", "")


async def test_more_inputs_than_allowed_are_refused() -> None:
    router = FAST_ROUTER.model_copy(update={"limits": LimitsConfig(max_embed_inputs=2)})
    async with bench(E1, router=router) as running:
        with pytest.raises(BatonError) as caught:
            await embed(running, "a", "b", "c")
    assert violations(caught.value) == ["inputs"]


async def test_more_vectors_than_an_answer_may_have_are_refused_before_any_is_made() -> None:
    router = FAST_ROUTER.model_copy(update={"limits": LimitsConfig(max_embed_numbers=200)})
    async with bench(E1, router=router) as running:
        with pytest.raises(BatonError, match="at most 3: send fewer") as caught:
            await embed(running, *"abcd")
        fewer = await embed(running, *"abcd", dimensions=50)
    assert violations(caught.value) == ["inputs"]
    assert len(fewer.embeddings) == 4


async def test_a_vector_that_is_longer_than_all_room_is_made_and_others_after_it() -> None:
    room = VectorRoom(10)
    async with time_limit(5):
        async with room.hold(2**32):
            pass
        async with room.hold(10):
            pass


async def test_requests_wait_while_others_have_the_room_for_vectors() -> None:
    room = VectorRoom(10)
    order: list[str] = []

    async def make(name: str, numbers: int, may_end: asyncio.Event) -> None:
        async with room.hold(numbers):
            order.append(name)
            await may_end.wait()

    ends = [asyncio.Event() for _ in range(4)]
    sizes = zip("abcd", (6, 6, 6, 4), ends, strict=True)
    tasks = [asyncio.create_task(make(*each)) for each in sizes]
    await eventually(lambda: order == ["a"])
    tasks[1].cancel()  # the first that waits
    ends[0].set()
    await eventually(lambda: order == ["a", "c", "d"])
    for each in ends:
        each.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_many_inputs_are_divided_among_the_workers() -> None:
    calls = since("baton_worker_calls_total", stage="embed", outcome="ok", reason="OK")
    async with bench(E1, E2) as running:
        response = await embed(running, *(f"text {number}" for number in range(150)))
        alone = await embed(running, "text 149")
    assert response.embeddings[149] == alone.embeddings[0]
    assert len(response.embeddings) == 150
    assert calls.grown == 3 + 1


async def test_a_model_without_the_role_is_refused_and_one_without_a_ready_worker_is_unavailable() -> None:
    async with bench(DECODE) as running:
        with pytest.raises(BatonError, match="embeddings") as caught:
            await embed(running, "x")
        assert caught.value.reason == "UNSUPPORTED"
    async with bench(E1) as running:
        await running.proxies["e1"].cut()
        await eventually(lambda: bool(running.cluster.workers[0].problem))
        with pytest.raises(BatonError) as lost:
            await embed(running, "x")
    assert lost.value.reason == "NO_WORKER"


@pytest.mark.feature("recovery from a lost embed worker", engine="simulated", facade="grpc")
async def test_a_lost_worker_is_replaced_by_another() -> None:
    slow = [simulated(name, "embed", embed_seconds=1.0) for name in ("e1", "e2")]
    async with bench(*slow) as running:
        asked = asyncio.ensure_future(embed(running, "x"))
        busy = lambda: [name for name, worker in running.workers.items() if worker.engines.load().running]  # noqa: E731
        await eventually(lambda: bool(busy()))
        await running.proxies[busy()[0]].cut()
        response = await asked
        expected = await embed(running, "x")
    assert response.embeddings[0] == expected.embeddings[0]


async def test_a_passed_deadline_and_a_cancel_stop_the_worker() -> None:
    async with bench(simulated("e1", "embed", embed_seconds=30.0)) as running:
        with pytest.raises(BatonError) as caught:
            await embed(running, "x", timeout=0.5)
        assert caught.value.reason == "DEADLINE_EXCEEDED"
        await eventually(lambda: running.workers["e1"].engines.load().running == 0)
        asked = asyncio.ensure_future(embed(running, "x", request_id="mine"))
        await eventually(lambda: running.workers["e1"].engines.load().running == 1)
        cancelling = generate_pb2.CancelGenerationRequest(request_id="mine")
        answer = await running.stub.CancelGeneration(cancelling, timeout=60)
        with pytest.raises(BatonError) as cancelled:
            await asked
        await eventually(lambda: running.workers["e1"].engines.load().running == 0)
    assert cancelled.value.reason == "CANCELLED"
    assert [receipt.worker_id for receipt in answer.receipts] == ["e1"]


@pytest.mark.feature("quotas of tenants", engine="simulated", facade="grpc")
async def test_quotas_count_requests_and_tokens() -> None:
    quotas = QuotasConfig(default=QuotaConfig(tokens_per_second=0.001, burst_seconds=5000))
    async with bench(E1, router=FAST_ROUTER.model_copy(update={"quotas": quotas})) as running:
        await embed(running, "four5")
        with pytest.raises(BatonError) as caught:
            await embed(running, "x")
    assert caught.value.reason == "QUOTA_EXCEEDED"


async def test_requests_beyond_the_limit_wait_their_turn() -> None:
    admission = AdmissionConfig(max_running_per_worker=1)
    router = FAST_ROUTER.model_copy(update={"admission": admission})
    async with bench(simulated("e1", "embed", embed_seconds=0.05), router=router) as running:
        responses = await asyncio.gather(*(embed(running, "x") for _ in range(4)))
    assert len({response.embeddings[0].SerializeToString() for response in responses}) == 1


async def test_the_model_list_says_what_vectors_a_model_makes() -> None:
    async with bench(DECODE, E1) as running:
        models = await unary(running.stub.ListModels(model_pb2.ListModelsRequest(), timeout=60))
        generated = await running.generate(prompt="x", stopping={"max_tokens": 2})
    [model] = models.models
    assert (model.embed_workers, model.decode_workers, model.embedding.dimensions) == (1, 1, 64)
    assert len(generated.token_ids) == 2


async def test_a_request_is_counted_and_logged_as_others_are() -> None:
    labels = {"model": "demo", "request_class": "embed", "outcome": "ok", "reason": "OK"}
    requests = since("baton_router_requests_total", **labels)
    with capture_logs(processors=[merge_log_fields]) as logs:
        async with bench(E1) as running:
            await embed(running, "x", request_id="mine")
    assert requests.grown == 1
    assert [line["prompt_tokens"] for line in logs if "InferenceService/Embed" in str(line)] == [1]


async def test_a_worker_without_the_role_says_so() -> None:
    async with bench(DECODE, E1) as running:
        worker = next(one for one in running.cluster.workers if one.record.worker_id == "d1")
        stub = worker.stub(embed_pb2_grpc.EmbedServiceStub)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Embed(engine_pb2.EmbedRequest(request_id="r"), timeout=60)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
