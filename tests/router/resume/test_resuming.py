"""An answer whose stream was lost goes on at another router, and is the one that an undisturbed stream gives."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.trace import SpanKind
from support.clients.resuming import Received
from support.clients.scraping import since
from support.cluster.in_process import FAST_ROUTER, PATIENT, bench, simulated
from support.cluster.router_pair import Pair, kept_request, read, router_pair
from support.eventually import PATIENCE_SECONDS, eventually
from support.images.pictures import picture
from support.recorded_spans import recorded

import services.roles.decode
from baton.calls import unary
from baton.engine.v1 import decode_pb2
from baton.errors import InvalidRequest, NoWorker, PositionInvalid, StaleAttempt, StreamAdopted, StreamLost, Unsupported
from baton.inference.v1 import cluster_service_pb2, generate_pb2, inference_service_pb2_grpc, timing_pb2
from baton_http2.server.reply import Reply
from discovery.memory import MemoryRegistry
from router.config import QuotaConfig, QuotasConfig
from router.resume import finding
from router.resume.handle import Handle, answer_call_id
from router.resume.resumer import Resumer
from router.server import host_router
from rpc.channels import open_channel
from rpc.tracing.span import entered
from runtime.aio import timeout
from services.resume.attaching import attached
from services.resume.stream import KeptStream


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with router_pair("prefill", "decode", "prefill+decode") as found:
        yield found
        await eventually(lambda: found.running.used_blocks() == 0)


async def _whole(pair: Pair, request: generate_pb2.GenerateRequest) -> Received:
    return await read(pair.first.Generate(request, timeout=PATIENCE_SECONDS), Received(request))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"sampling": {"temperature": 0.0}},
    "logprobs": {"response": {"logprobs": 2}},
    "stop_string": {"stopping": {"stop": ["ab", "q", "zz"]}},
    "slow_pace": {"response": {"min_tokens_per_message": 7}},
    "three_answers": {"sampling": {"seed": 5, "temperature": 0.8, "n": 3}},
    "penalties": {"sampling": {"seed": 3, "temperature": 0.9, "presence_penalty": 1.0}},
    "ids": {"prompt": None, "token_ids": {"ids": [10, 11, 12, 13]}},
    "aggregated": {"routing": {"topology": generate_pb2.TOPOLOGY_AGGREGATED}},
}


@pytest.mark.parametrize("with_copy", [False, True], ids=["handle_alone", "with_copy"])
async def test_a_lost_stream_of_an_answer_to_an_image_goes_on_where_it_runs(*, with_copy: bool) -> None:
    request = kept_request(prompt="<image>resume me", media=[{"data": picture(), "mime_type": "image/png"}])
    async with router_pair("encode", "prefill", "decode", image_tokens=4, image_hidden_size=8) as pair:
        expected = await _whole(pair, request)
        received = await read(pair.first.Generate(request), Received(request), until=5)
        await read(pair.second.ResumeGeneration(received.resume(with_copy=with_copy)), received)
    assert received.whole == expected.whole
    assert not any(one.recomputed for one in received.resumed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_copy", [False, True], ids=["handle_alone", "with_copy"])
async def test_a_lost_stream_goes_on_exactly_at_another_router(pair: Pair, kind: str, with_copy: bool) -> None:
    request = kept_request(**KINDS[kind])
    expected = await _whole(pair, request)
    chosen = random.Random(kind)
    for _ in range(3):
        cut = chosen.randrange(1, max(2, expected.tokens))
        received = await read(pair.first.Generate(request), Received(request), until=cut)
        if received.finished is None:
            again = chosen.randrange(received.tokens + 1, expected.tokens + 2)
            await read(pair.second.ResumeGeneration(received.resume(with_copy=with_copy)), received, until=again)
        if received.finished is None:
            await read(pair.first.ResumeGeneration(received.resume(with_copy=with_copy)), received)
        assert received.whole == expected.whole
        if with_copy is False:
            assert not any(one.recomputed for one in received.resumed)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_no_worker_has_is_computed_from_the_clients_copy(pair: Pair, kind: str) -> None:
    request = kept_request(**KINDS[kind])
    expected = await _whole(pair, request)
    received = await read(pair.first.Generate(request), Received(request), until=min(20, expected.tokens - 1))
    for worker in pair.running.workers.values():
        worker.kept.forget_all()
    await read(pair.second.ResumeGeneration(received.resume()), received)
    assert received.whole == expected.whole
    assert [one.recomputed for one in received.resumed] == [True]


async def test_who_has_all_tokens_and_no_end_gets_it_from_its_own_copy(pair: Pair) -> None:
    request = kept_request()
    expected = await _whole(pair, request)
    received = await read(pair.first.Generate(request), Received(request), until=expected.tokens)
    for worker in pair.running.workers.values():
        worker.kept.forget_all()
    await read(pair.second.ResumeGeneration(received.resume()), received)
    assert received.whole == expected.whole


async def test_without_a_copy_a_lost_answer_is_not_found(pair: Pair) -> None:
    received = await read(pair.first.Generate(kept_request()), Received(kept_request()), until=5)
    for worker in pair.running.workers.values():
        worker.kept.forget_all()
    with pytest.raises(StreamLost):
        await read(pair.second.ResumeGeneration(received.resume(with_copy=False)), received)


async def test_a_router_that_knows_no_worker_yet_is_asked_again_later(pair: Pair) -> None:
    received = await read(pair.first.Generate(kept_request()), Received(kept_request()), until=5)
    async with host_router(FAST_ROUTER, MemoryRegistry("empty")) as young, open_channel(young.address) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        for with_copy in (False, True):
            with pytest.raises(NoWorker):
                await read(stub.ResumeGeneration(received.resume(with_copy=with_copy)), received)
    await read(pair.second.ResumeGeneration(received.resume(with_copy=False)), received)
    assert received.finished is not None


async def test_a_client_that_resumes_at_the_same_router_displaces_its_first_stream(pair: Pair) -> None:
    request = kept_request(request_id="mine", stopping={"max_tokens": 300})
    expected = await _whole(pair, request)
    first, error = Received(request), None

    async def read_first() -> None:
        nonlocal error
        try:
            await read(pair.first.Generate(request), first)
        except StreamAdopted as adopted:
            error = adopted

    reading = asyncio.create_task(read_first())
    await eventually(lambda: first.tokens > 5)
    second = Received(request, first.handle, first.seed)
    second.positions, second.ids, second.texts = {}, {}, {}
    await read(pair.first.ResumeGeneration(second.resume(with_copy=False)), second)
    await reading
    assert error is not None
    assert second.whole == expected.whole


async def test_a_finished_answer_is_given_again_to_who_missed_its_end(pair: Pair) -> None:
    request = kept_request()
    expected = await _whole(pair, request)
    received = await read(pair.first.Generate(request), Received(request), until=79)
    await asyncio.sleep(0.2)
    await read(pair.second.ResumeGeneration(received.resume(with_copy=False)), received)
    assert received.whole == expected.whole


async def test_without_keep_nothing_is_told_and_leaving_stops_the_request(pair: Pair) -> None:
    request = kept_request()
    request.response.ClearField("keep")
    received = await read(pair.first.Generate(request), Received(request), until=5)
    assert not received.handle
    await eventually(lambda: pair.running.used_blocks() == 0)
    assert all(len(worker.kept) == 0 for worker in pair.running.workers.values())


async def test_a_cancel_by_the_handle_reaches_an_answer_that_nobody_reads(pair: Pair) -> None:
    request = kept_request(stopping={"max_tokens": 900}, sampling={"n": 2, "seed": 1})
    received = await read(pair.first.Generate(request), Received(request), until=10)
    await unary(pair.second.CancelGeneration(generate_pb2.CancelGenerationRequest(handle=received.handle)))
    await eventually(lambda: pair.running.used_blocks() == 0)
    with pytest.raises(StreamLost):
        await unary(pair.first.CancelGeneration(generate_pb2.CancelGenerationRequest(handle=received.handle)))


async def test_an_answer_goes_on_after_its_worker_is_lost_too(pair: Pair) -> None:
    request = kept_request(stopping={"max_tokens": 300})
    expected = await _whole(pair, request)
    received = await read(pair.first.Generate(request), Received(request), until=10)
    await read(pair.second.ResumeGeneration(received.resume(with_copy=False)), received, until=20)
    workers = pair.running.workers
    [worker_id] = [name for name, one in workers.items() if one.kept.usage.attached or one.kept.usage.parked]

    async def lose() -> None:
        await eventually(lambda: received.tokens > 40)
        await pair.running.stop(worker_id)

    losing = asyncio.create_task(lose())
    await read(pair.first.ResumeGeneration(received.resume()), received)
    await losing
    assert received.whole == expected.whole


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"handle": "b1.nonsense"}, InvalidRequest),
        ({"handle": ""}, InvalidRequest),
        ({"attempt": 0}, InvalidRequest),
        ({"have": [{"index": 0, "tokens": 100_000}]}, PositionInvalid),
        ({"have": [{"index": 0}, {"index": 0}]}, InvalidRequest),
        ({"have": [{"index": 99}]}, InvalidRequest),
    ],
)
async def test_a_wrong_request_to_resume_names_its_field(pair: Pair, change: dict[str, Any], error: type) -> None:
    received = await read(pair.first.Generate(kept_request()), Received(kept_request()), until=5)
    fields = {"handle": received.handle, "attempt": 1, **change}
    with pytest.raises(error):
        await read(pair.second.ResumeGeneration(generate_pb2.ResumeGenerationRequest(**fields)), received)


async def test_received_ids_must_be_as_many_as_the_position_says(pair: Pair) -> None:
    received = await read(pair.first.Generate(kept_request()), Received(kept_request()), until=5)
    asked = received.resume()
    asked.received[0].ids.append(1)
    with pytest.raises(PositionInvalid, match="received"):
        await read(pair.second.ResumeGeneration(asked), received)


async def test_an_old_attempt_and_another_tenant_are_refused(pair: Pair) -> None:
    received = await read(pair.first.Generate(kept_request()), Received(kept_request()), until=5)
    received.attempt = 4
    tenant = (("x-baton-tenant", "another"),)
    with pytest.raises(StreamLost):
        await read(pair.second.ResumeGeneration(received.resume(with_copy=False), metadata=tenant), received)
    await read(pair.second.ResumeGeneration(received.resume(with_copy=False)), received, until=10)
    received.attempt = 3
    with pytest.raises(StaleAttempt):
        await read(pair.second.ResumeGeneration(received.resume()), received)


async def test_an_answer_in_one_message_cannot_be_kept(pair: Pair) -> None:
    with pytest.raises(Unsupported, match="keep"):
        await unary(pair.first.GenerateUnary(generate_pb2.GenerateUnaryRequest(request=kept_request())))


async def test_a_negative_keep_is_refused(pair: Pair) -> None:
    request = generate_pb2.GenerateRequest(prompt="a", response={"keep": {"seconds": -1}})
    with pytest.raises(InvalidRequest, match=r"response\.keep"):
        await read(pair.first.Generate(request), Received(request))


async def test_a_busy_worker_that_has_the_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not answer in the time of one question, and is well: nothing is computed again."""
    monkeypatch.setattr(finding, "_ANSWER_SECONDS", 0.3)
    worker, request = simulated("worker", "prefill", "decode", decode_step_seconds=0.002), kept_request()
    async with timeout(50), bench(worker, router=PATIENT) as running, host_router(PATIENT, running.registry) as other:
        await eventually(lambda: any(not worker.problem for worker in other.cluster.workers))
        async with open_channel(other.address) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            received = await read(running.stub.Generate(request), Received(request), until=5)
            running.proxies["worker"].freeze()
            resuming = asyncio.create_task(read(stub.ResumeGeneration(received.resume()), received))
            await asyncio.sleep(0.6)
            assert not resuming.done()
            await running.proxies["worker"].restore()
            await resuming
    assert [resumed.recomputed for resumed in received.resumed] == [False]


async def test_any_router_tells_how_far_an_answer_is_and_its_reader_goes_on(pair: Pair) -> None:
    request = kept_request(sampling={"seed": 5, "temperature": 0.8, "n": 2}, stopping={"max_tokens": 300})
    received = Received(request)
    reading = asyncio.create_task(read(pair.first.Generate(request), received))
    await eventually(lambda: received.tokens > 5)
    asked = generate_pb2.GetGenerationProgressRequest(handle=received.handle)
    early = await unary(pair.second.GetGenerationProgress(asked))
    assert [one.index for one in early.answers] == [0, 1]
    assert all(0 < one.tokens < 300 and not one.is_over for one in early.answers)
    await reading
    assert received.whole == (await _whole(pair, request)).whole
    late = await unary(pair.second.GetGenerationProgress(asked))
    assert [(one.tokens, one.is_over) for one in late.answers] == [(300, True), (300, True)]


async def test_progress_is_told_to_the_owner_alone(pair: Pair) -> None:
    received = await read(pair.first.Generate(kept_request()), Received(kept_request()), until=5)
    asked = generate_pb2.GetGenerationProgressRequest(handle=received.handle)
    tenant = (("x-baton-tenant", "another"),)
    with pytest.raises(StreamLost):
        await unary(pair.second.GetGenerationProgress(asked, metadata=tenant))
    with pytest.raises(InvalidRequest, match="handle"):
        await unary(pair.second.GetGenerationProgress(generate_pb2.GetGenerationProgressRequest(handle="b1.")))


@pytest.mark.parametrize("seeded", [True, False])
async def test_of_several_answers_only_the_lost_one_is_computed_again(pair: Pair, seeded: bool) -> None:
    sampling = {"temperature": 0.8, "n": 3, **({"seed": 5} if seeded else {})}
    request = kept_request(sampling=sampling, stopping={"max_tokens": 120})
    for lost in range(3):
        received = await read(pair.first.Generate(request), Received(request), until=90)
        before = {index: list(ids) for index, ids in received.ids.items()}
        call_id = answer_call_id(Handle.parse(received.handle).call_id, lost)
        [worker] = [one for one in pair.running.workers.values() if _finds(one, call_id)]
        _forget(worker, call_id)
        await read(pair.second.ResumeGeneration(received.resume()), received)
        assert [one.recomputed for one in received.resumed] == [True]
        assert {index: len(ids) for index, ids in received.ids.items()} == {0: 120, 1: 120, 2: 120}
        assert all(received.ids[index][: len(ids)] == ids for index, ids in before.items())
        call_ids = {answer_call_id(Handle.parse(received.handle).call_id, answer) for answer in range(3)}
        streams = [one for worker in pair.running.workers.values() for one in worker.kept.streams]
        assert sorted(one.attachment for one in streams if one.kept.request_id in call_ids) == [1, 2, 2]
        if seeded:
            assert received.whole == (await _whole(pair, request)).whole


async def test_an_answer_that_goes_on_is_charged_once() -> None:
    quota = QuotaConfig(requests_per_second=0.01, tokens_per_second=1.0, burst_seconds=5000.0)
    quotas = QuotasConfig(tenants={"acme": quota})
    router = FAST_ROUTER.model_copy(update={"quotas": quotas})
    metadata = (("x-baton-tenant", "acme"),)
    async with bench(
        simulated("worker", "prefill", "decode", decode_step_seconds=0.002), router=router, proxied=False
    ) as running:
        request = kept_request(stopping={"max_tokens": 200})

        async def left() -> tuple[float, float]:
            [tenant] = (await running.operators.ListTenants(cluster_service_pb2.ListTenantsRequest())).tenants
            return tenant.requests_left, tenant.tokens_left

        received = await read(running.stub.Generate(request, metadata=metadata), Received(request), until=50)
        for cut in (100, 150, 10**9):
            await read(running.stub.ResumeGeneration(received.resume(), metadata=metadata), received, until=cut)
        assert received.finished is not None
        requests, tokens = await left()
        used = received.finished.usage.prompt_tokens + 200
        assert requests == pytest.approx(49, abs=0.5)
        # A part that was on its way when the client left may be charged to both streams.
        assert used - 5 <= 5000 - tokens <= used + 60
        # Without a worker that has it, nothing shows that it was asked before.
        for worker in running.workers.values():
            worker.kept.forget_all()
        await read(running.stub.ResumeGeneration(received.resume(), metadata=metadata), Received(request))
        assert (await left())[0] == pytest.approx(requests - 1, abs=0.5)


def _finds(worker: Any, call_id: str) -> list[decode_pb2.FoundStream]:
    return list(worker.kept.find(decode_pb2.FindStreamsRequest(request_ids=[call_id])))


def _forget(worker: Any, call_id: str) -> None:
    [found] = _finds(worker, call_id)
    attachment = next(one.attachment for one in worker.kept.streams if one.kept.request_id == call_id)
    worker.kept.settle(decode_pb2.SettleRequest(request_id=found.request_id, attachment=attachment, forget=True))


async def test_an_answer_is_found_by_its_handle_alone_with_one_call_to_its_worker(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[decode_pb2.AttachRequest] = []

    def telling(stream: KeptStream, request: decode_pb2.AttachRequest) -> decode_pb2.DecodeResponse:
        asked.append(request)
        return attached(stream, request)

    monkeypatch.setattr(services.roles.decode, "attached", telling)
    for answers in (1, 3):
        asked.clear()
        request = kept_request(sampling={"seed": 5, "temperature": 0.8, "n": answers})
        received = await read(pair.first.Generate(request), Received(request), until=10)
        await read(pair.second.ResumeGeneration(received.resume(with_copy=False)), received)
        assert (len(asked), any(one.peek for one in asked)) == (answers, False)


async def test_an_answer_that_goes_on_is_counted_traced_and_timed(pair: Pair) -> None:
    adopted, again = (since("baton_router_resumptions_total", result=one) for one in ("adopted", "computed_again"))
    lost = since("baton_router_resumptions_total", result="lost")
    request = kept_request()
    received = await read(pair.first.Generate(request), Received(request), until=10)

    async def send(message: generate_pb2.GenerateResponse) -> None:
        received.add(message)

    async with recorded() as (tracer, spans):
        servicer = Resumer(pair.other.path.contexts, pair.other.path.pipeline)
        with entered(tracer.begin("test", None, SpanKind.SERVER)):
            reply = Reply(send, lambda _trailer: None)
            assert await servicer.adopt(received.resume(with_copy=False), _Call(), lambda _record: reply)
    assert received.finished is not None
    assert received.finished.timings[0].stage == timing_pb2.STAGE_ADOPT
    assert (spans.named("baton.resume").attributes or {})["baton.is_adopted"] is True
    assert (spans.named("adopt").attributes or {})["baton.adopted"] == 1
    for worker in pair.running.workers.values():
        worker.kept.forget_all()
    with pytest.raises(StreamLost):
        await read(pair.second.ResumeGeneration(received.resume(with_copy=False)), received)
    await read(pair.second.ResumeGeneration(received.resume()), Received(request))
    assert (adopted.grown, again.grown, lost.grown) == (1, 1, 1)


class _Call:
    """A call without metadata and without a deadline."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None
