"""WorkerService and the guards before prefill and decode, over the wire."""

import asyncio
from contextlib import aclosing

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.worker_calls import TEXT, decode_request
from support.cluster.workers import LEASE_SECONDS, Running, Starter
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import stream, unary
from baton.engine.v1 import prompt_pb2, worker_pb2
from baton.errors import (
    BatonError,
    Cancelled,
    Draining,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    RequestExists,
    RoleMismatch,
    Unsupported,
)
from baton.inference.v1 import cluster_service_pb2, sampling_pb2, timing_pb2
from engine_protocol.prefix_hash import block_hashes
from rpc.channels import open_channel
from runtime.aio import timeout


async def test_the_card_has_all_that_a_router_needs(prefill: Running) -> None:
    answer = await unary(prefill.calls.worker.GetModel(worker_pb2.GetModelRequest(), timeout=PATIENCE_SECONDS))
    card = answer.card
    assert (card.name, card.limits.vocab_size, list(card.eos_token_ids)) == ("simulated", 257, [256])
    assert card.limits.max_context_tokens == 64 * 16
    assert card.layout.digest == prefill.worker.engine.facts.layout.digest
    assert b"ByteLevel" in card.tokenizer_json
    assert card.capabilities.chat


async def test_the_record_is_in_the_registry_once_the_worker_is_ready(prefill: Running) -> None:
    [record] = prefill.registry.workers()
    assert (record.worker_id, record.epoch, record.address) == (
        prefill.worker.worker_id,
        prefill.worker.epoch,
        prefill.worker.address,
    )
    assert (record.roles, record.model, record.draining) == (("prefill",), "simulated", False)
    assert record.layout_digest == prefill.worker.engine.facts.layout.digest


async def test_a_decode_worker_refuses_to_prefill_naming_its_roles(decode: Running) -> None:
    with pytest.raises(RoleMismatch, match="its roles are decode"):
        await decode.calls.prefill()


async def test_a_prefill_worker_refuses_to_decode_naming_its_roles(prefill: Running) -> None:
    with pytest.raises(RoleMismatch, match="its roles are prefill"):
        await prefill.calls.decode(decode_request())


async def test_an_error_says_at_which_stage_and_worker_it_happened(prefill: Running) -> None:
    with pytest.raises(BatonError) as raised:
        await prefill.calls.decode(decode_request())
    assert (raised.value.stage, raised.value.worker_id) == ("decode", prefill.worker.worker_id)


async def test_a_worker_of_both_roles_hands_over_to_itself(start: Starter) -> None:
    async with start("prefill", "decode") as both:
        handoff = await both.calls.prefill()
        decoded = await both.calls.decode(decode_request(handoff))
        assert len(decoded.token_ids) == 19


async def test_another_model_is_not_found_naming_the_one_that_is_served(decode: Running) -> None:
    request = decode_request()
    request.model = "other"
    with pytest.raises(ModelNotFound, match="simulated"):
        await decode.calls.decode(request)


async def test_a_request_without_an_id_is_refused(decode: Running) -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        await decode.calls.decode(decode_request(request_id=""))


async def test_a_request_id_that_is_running_is_refused(start: Starter) -> None:
    async with start("decode", decode_step_seconds=0.05) as decode:
        running = asyncio.create_task(decode.calls.decode(decode_request(max_tokens=500)))
        await eventually(lambda: decode.blocks_used > 0)
        with pytest.raises(RequestExists):
            await decode.calls.decode(decode_request())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_request_id_may_be_used_again_after_its_end(decode: Running) -> None:
    await decode.calls.decode(decode_request())
    assert len((await decode.calls.decode(decode_request())).token_ids) == 20


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (sampling_pb2.SamplingParams(temperature=-1), "sampling.params.temperature"),
        (sampling_pb2.SamplingParams(temperature=float("nan")), "sampling.params.temperature"),
        (sampling_pb2.SamplingParams(top_p=0), "sampling.params.top_p"),
        (sampling_pb2.SamplingParams(min_p=1.5), "sampling.params.min_p"),
        (sampling_pb2.SamplingParams(repetition_penalty=0), "sampling.params.repetition_penalty"),
        (sampling_pb2.SamplingParams(presence_penalty=3), "sampling.params.presence_penalty"),
        (sampling_pb2.SamplingParams(logit_bias={5: 101}), "sampling.params.logit_bias[5]"),
        (sampling_pb2.SamplingParams(logit_bias={300: 1}), "sampling.params.logit_bias[300]"),
    ],
)
async def test_a_parameter_out_of_range_is_refused_by_name(
    decode: Running, params: sampling_pb2.SamplingParams, field: str
) -> None:
    request = decode_request()
    request.sampling.params.CopyFrom(params)
    with pytest.raises(InvalidRequest) as refused:
        await decode.calls.decode(request)
    assert [violation.field for violation in refused.value.violations] == [field]


async def test_every_wrong_field_is_named_at_once(decode: Running) -> None:
    request = decode_request()
    request.sampling.CopyFrom(prompt_pb2.Sampling(params=sampling_pb2.SamplingParams(temperature=-1, top_p=2)))
    with pytest.raises(InvalidRequest) as refused:
        await decode.calls.decode(request)
    assert [violation.field for violation in refused.value.violations] == [
        "sampling.params.temperature",
        "sampling.params.top_p",
        "sampling.stop.max_tokens",
    ]


@pytest.mark.parametrize(
    ("text", "field"), [(b"", "prompt.token_ids"), (b"x" * 1024, "prompt.token_ids"), (b"x" * 5000, "prompt.token_ids")]
)
async def test_a_prompt_that_cannot_fit_is_refused_by_name(decode: Running, text: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await decode.calls.decode(decode_request(text=text))
    assert refused.value.violations[0].field == field


@pytest.mark.parametrize(
    ("ids", "field"), [([], "sampling.bad_sequences[1].ids"), ([5, 300], "sampling.bad_sequences[1].ids[1]")]
)
async def test_bad_sequences_are_checked_by_the_vocabulary(decode: Running, ids: list[int], field: str) -> None:
    request = decode_request()
    request.sampling.bad_sequences.add(ids=[5])
    request.sampling.bad_sequences.add(ids=ids)
    with pytest.raises(InvalidRequest) as refused:
        await decode.calls.decode(request)
    assert [violation.field for violation in refused.value.violations] == [field]


async def test_a_worker_takes_no_bad_words_as_texts(decode: Running) -> None:
    request = decode_request()
    request.sampling.params.bad_words.append("fox")
    with pytest.raises(Unsupported, match="bad_words"):
        await decode.calls.decode(request)


async def test_more_than_one_answer_is_unsupported(decode: Running) -> None:
    request = decode_request()
    request.sampling.params.n = 2
    with pytest.raises(Unsupported, match="n = 1"):
        await decode.calls.decode(request)


async def test_the_load_counts_held_blocks_once(prefill: Running) -> None:
    await prefill.calls.prefill()
    answer = await unary(prefill.calls.worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=PATIENCE_SECONDS))
    assert answer.load == cluster_service_pb2.WorkerLoad(blocks_total=64, blocks_used=4, blocks_held=4)


async def test_a_watched_load_is_sent_when_it_changes(prefill: Running) -> None:
    request = worker_pb2.WatchLoadRequest(interval=Duration(nanos=10_000_000))
    call = prefill.calls.worker.WatchLoad(request, timeout=PATIENCE_SECONDS)
    async with timeout(PATIENCE_SECONDS), aclosing(stream(call)) as loads:
        assert (await anext(loads)).load.blocks_held == 0
        handoff = await prefill.calls.prefill()
        # That it waited and ran may have been seen as well.
        while (await anext(loads)).load.blocks_held != 4:
            pass
        await prefill.calls.release(handoff)
        assert (await anext(loads)).load.blocks_held == 0


async def test_a_watched_load_that_does_not_change_is_repeated_if_that_is_asked_for(prefill: Running) -> None:
    request = worker_pb2.WatchLoadRequest(interval=Duration(nanos=10_000_000), repeat_after=Duration(nanos=50_000_000))
    call = prefill.calls.worker.WatchLoad(request, timeout=PATIENCE_SECONDS)
    async with timeout(PATIENCE_SECONDS), aclosing(stream(call)) as loads:
        assert [(await anext(loads)).load for _ in range(3)] == [cluster_service_pb2.WorkerLoad(blocks_total=64)] * 3


async def test_an_engine_without_kv_events_says_so(start: Starter) -> None:
    async with start("prefill", kv_events=False) as prefill:
        call = prefill.calls.worker.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=PATIENCE_SECONDS)
        with pytest.raises(Unsupported, match="does not report its prefix cache"):
            async with aclosing(stream(call)) as events:
                await anext(events)


async def test_a_subscriber_is_told_what_is_cached_and_then_each_step_in_one_message(prefill: Running) -> None:
    hashes = block_hashes(tuple(TEXT), 16)
    await prefill.calls.release(await prefill.calls.prefill())
    call = prefill.calls.worker.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=PATIENCE_SECONDS)
    async with timeout(PATIENCE_SECONDS), aclosing(stream(call)) as events:
        first = await anext(events)
        assert (first.sequence, first.epoch, list(first.snapshot.block_hashes)) == (0, prefill.worker.epoch, hashes)
        text = TEXT + b" and once more, which are two more blocks"
        await prefill.calls.release(await prefill.calls.prefill(text=text))
        second = await anext(events)
        assert (second.sequence, list(second.changed.stored)) == (1, block_hashes(tuple(text), 16)[3:])


async def test_aborting_a_decode_answers_when_its_blocks_are_back(start: Starter) -> None:
    async with start("decode", decode_step_seconds=0.02) as decode:
        running = asyncio.create_task(decode.calls.decode(decode_request(max_tokens=500)))
        await eventually(lambda: decode.worker.engines.load().running == 1)
        aborted = await decode.calls.abort()
        assert decode.blocks_used == 0
        assert (aborted.found, aborted.stage, aborted.blocks_freed) == (True, timing_pb2.STAGE_DECODE, 4)
        assert aborted.tokens_discarded >= len(TEXT)
        with pytest.raises(Cancelled, match="aborted"):
            await running


async def test_aborting_a_prefill_answers_when_its_blocks_are_back(start: Starter) -> None:
    async with start("prefill", prefill_base_seconds=30) as prefill:
        running = asyncio.create_task(prefill.calls.prefill())
        await eventually(lambda: prefill.blocks_used > 0)
        aborted = await prefill.calls.abort()
        assert prefill.blocks_used == 0
        assert (aborted.stage, aborted.blocks_freed) == (timing_pb2.STAGE_PREFILL_COMPUTE, 4)
        with pytest.raises(Cancelled):
            await running


async def test_aborting_a_request_frees_what_is_held_for_it(prefill: Running) -> None:
    handoff = await prefill.calls.prefill()
    other = await prefill.calls.prefill("other")
    aborted = await prefill.calls.abort()
    assert (aborted.found, aborted.blocks_freed) == (True, 4)
    assert not (await prefill.calls.release(handoff)).still_valid
    assert (await prefill.calls.release(other)).still_valid


async def test_aborting_a_decode_that_waits_for_blocks_releases_the_handoff(start: Starter, prefill: Running) -> None:
    async with start("decode", num_blocks=8, decode_step_seconds=0.1) as decode:
        busy = asyncio.create_task(decode.calls.decode(decode_request(None, "busy", b"b" * 100, max_tokens=28)))
        await eventually(lambda: decode.blocks_used >= 7)
        waiting = asyncio.create_task(decode.calls.decode(decode_request(await prefill.calls.prefill())))
        await eventually(lambda: decode.worker.engines.load().waiting == 1)
        aborted = await decode.calls.abort()
        assert aborted.stage == timing_pb2.STAGE_HANDOFF_WAIT
        await eventually(lambda: prefill.blocks_used == 0, LEASE_SECONDS / 2)
        await decode.calls.abort("busy")
        results = await asyncio.gather(busy, waiting, return_exceptions=True)
        assert [type(result) for result in results] == [Cancelled, Cancelled]


async def test_a_decode_whose_reader_does_not_read_can_be_aborted(start: Starter) -> None:
    async with start("decode", num_blocks=2048) as decode:
        call = decode.calls.decodes.Decode(decode_request(max_tokens=30_000))
        await call.read()
        assert (await decode.calls.abort()).found
        assert decode.blocks_used == 0
        call.cancel()


async def test_aborting_an_unknown_request_finds_nothing(decode: Running) -> None:
    assert not (await decode.calls.abort("never")).found


async def test_a_draining_worker_refuses_new_work_and_says_so_in_the_registry(start: Starter) -> None:
    async with start("prefill", "decode") as both:
        [progress] = await _drain(both)
        assert progress.drained
        assert both.registry.workers()[0].draining
        with pytest.raises(Draining):
            await both.calls.prefill()
        with pytest.raises(Draining):
            await both.calls.decode(decode_request())


async def test_a_drain_lasts_until_what_runs_has_ended(start: Starter) -> None:
    async with start("decode", decode_step_seconds=0.02, drain_seconds=20) as decode:
        running = asyncio.create_task(decode.calls.decode(decode_request(max_tokens=20)))
        await eventually(lambda: decode.blocks_used > 0)
        progress = await _drain(decode)
        assert [(one.running, one.drained) for one in progress] == [(1, False), (0, True)]
        assert len((await running).token_ids) == 20


async def test_a_drain_lasts_until_handoffs_are_pulled(start: Starter, decode: Running) -> None:
    async with start("prefill", lease_seconds=10, drain_seconds=20) as prefill:
        handoff = await prefill.calls.prefill()
        draining = asyncio.create_task(_drain(prefill))
        await eventually(lambda: prefill.registry.workers()[-1].draining)
        decoded = await decode.calls.decode(decode_request(handoff))
        assert len(decoded.token_ids) == 19
        progress = await draining
        assert [(one.handoffs_held, one.drained) for one in progress] == [(1, False), (0, True)]


async def test_a_drain_stops_after_its_grace_what_still_runs(start: Starter) -> None:
    async with start("decode", decode_step_seconds=0.05, drain_seconds=60) as decode:
        running = asyncio.create_task(decode.calls.decode(decode_request(max_tokens=500)))
        await eventually(lambda: decode.blocks_used > 0)
        progress = await _drain(decode, Duration(nanos=100_000_000))
        assert progress[-1].drained
        with pytest.raises(Draining):
            await running


async def _drain(running: Running, grace: Duration | None = None) -> list[worker_pb2.DrainResponse]:
    call = running.calls.worker.Drain(worker_pb2.DrainRequest(grace=grace), timeout=PATIENCE_SECONDS)
    async with aclosing(stream(call)) as answers:
        return [answer async for answer in answers]


async def test_an_engine_that_fails_is_not_serving_and_not_registered(start: Starter) -> None:
    async with start("decode", fail_after_tokens=5) as decode, open_channel(decode.calls.address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(EngineFailed):
            await decode.calls.decode(decode_request())
        with pytest.raises(EngineFailed):
            await decode.worker.watch_engines()
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert start.registry.workers() == ()


async def test_every_role_of_a_ready_worker_is_serving(decode: Running) -> None:
    async with open_channel(decode.calls.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "baton.engine.v1.DecodeService", "baton.engine.v1.WorkerService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_that_can_hand_over_to_none_says_so_as_it_registers(
    start: Starter, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start("prefill", block_tokens=16), start("decode", block_tokens=32):
        said = capsys.readouterr()
        assert "worker cannot hand over" in said.out + said.err
        assert "KV_LAYOUT_MISMATCH" in said.out + said.err


async def test_a_worker_without_a_transport_in_common_says_so_as_it_registers(
    start: Starter, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start("prefill", transports=("shm",)) as prefill, start("decode", transports=("tcp",)):
        said = capsys.readouterr()
        shown = said.out + said.err
        assert "NO_COMMON_TRANSPORT" in shown
        assert f"it reads tcp; {prefill.worker.worker_id} offers shm" in shown
