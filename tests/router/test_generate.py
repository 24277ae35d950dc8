"""Successful requests on a prefill and a decode worker: the messages that a client gets."""

import asyncio
from typing import get_args

import pytest
from google.protobuf import json_format
from structlog.testing import capture_logs
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, Bench, bench, simulated
from support.eventually import eventually
from support.log_fields import merge_log_fields

from baton.inference.v1 import generate_pb2, model_pb2, sampling_pb2, timing_pb2, tokenize_pb2
from router.config import RoutingConfig
from rpc.server import ServerKind

SEEDED = {"temperature": 1.0, "seed": 7}


@pytest.mark.feature("prefill and decode on different workers", engine="simulated", facade="grpc")
@pytest.mark.feature("text prompts", engine="simulated", facade="grpc")
async def test_a_prompt_is_prefilled_on_one_worker_and_decoded_on_another(pair: Bench) -> None:
    stream = await pair.generate(prompt="hello", stopping={"max_tokens": 20})
    assert stream.placed == ("p1", "d1")
    assert stream.finished.topology == generate_pb2.TOPOLOGY_DISAGGREGATED
    assert len(stream.token_ids) == 20
    assert stream.finished.reason == sampling_pb2.FINISH_REASON_LENGTH


@pytest.mark.feature("streaming", engine="simulated", facade="grpc")
async def test_messages_come_in_order_and_are_numbered_without_gaps(pair: Bench) -> None:
    messages = (await pair.generate(prompt="hello", stopping={"max_tokens": 9})).messages
    events = [message.WhichOneof("event") for message in messages]
    assert (events[0], events[-1], set(events[1:-1])) == ("started", "finished", {"token"})
    assert [message.sequence for message in messages] == list(range(len(messages)))
    assert len({message.request_id for message in messages}) == 1


async def test_tokens_come_together_if_that_is_asked_for(pair: Bench) -> None:
    paced = await pair.generate(
        prompt="hello",
        sampling=SEEDED,
        stopping={"max_tokens": 50},
        response={"min_tokens_per_message": 8, "max_delay": {"seconds": 10}},
    )
    plain = await pair.generate(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 50})
    sizes = [len(message.token.token_ids) for message in paced.messages if message.HasField("token")]
    # The rest may come as one: a router that stood still finds all of it.
    assert (sizes[0], len(sizes) < 10) == (1, True)
    assert all(size >= 8 for size in sizes[1:-1])
    assert (paced.text, paced.token_ids) == (plain.text, plain.token_ids)


@pytest.mark.parametrize("streams", get_args(ServerKind))
async def test_what_carries_the_streams_to_workers_does_not_depend_on_what_serves(streams: ServerKind) -> None:
    router = FAST_ROUTER.model_copy(update={"worker_streams": streams})
    async with bench(PREFILL, simulated("d1", "decode"), router=router) as running:
        found = await asyncio.gather(
            *(running.generate(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 40}) for _ in range(8))
        )
        assert [len(one.token_ids) for one in found] == [40] * 8
        assert len({one.text for one in found}) == 1
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_stop_string_is_found_where_calls_share_a_stream_and_where_they_do_not() -> None:
    for multiplex in (True, False):
        router = FAST_ROUTER.model_copy(update={"multiplex": multiplex})
        slow = simulated("d1", "decode", decode_step_seconds=0.005)
        async with bench(PREFILL, slow, router=router) as running:
            whole = await running.generate(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 40})
            stop = whole.text[20:23]
            stream = await running.generate(
                prompt="hello", sampling=SEEDED, stopping={"max_tokens": 40, "stop": [stop]}
            )
            assert stream.text == whole.text[: whole.text.index(stop)]
            assert stream.finished.stop_string == stop
            await eventually(lambda: running.used_blocks() == 0)


async def test_the_first_token_comes_alone_and_once(pair: Bench) -> None:
    stream = await pair.generate(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 5})
    whole = await pair.generate(
        prompt="hello", sampling=SEEDED, stopping={"max_tokens": 5}, routing={"topology": "TOPOLOGY_AGGREGATED"}
    )
    assert whole.placed == ("", "d1")
    assert stream.token_ids == whole.token_ids


async def test_max_tokens_one_never_reaches_decode(pair: Bench) -> None:
    stream = await pair.generate(prompt="hello", stopping={"max_tokens": 1})
    assert len(stream.token_ids) == 1
    assert stream.placed == ("p1", "")
    assert stream.finished.reason == sampling_pb2.FINISH_REASON_LENGTH
    assert pair.used_blocks() == 0


async def test_a_stop_on_the_first_token_ends_it_and_frees_its_blocks(pair: Bench) -> None:
    first = (await pair.generate(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 1})).text
    stream = await pair.generate(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 50, "stop": [first]})
    assert (stream.text, len(stream.token_ids), stream.finished.stop_string) == ("", 1, first)
    assert stream.finished.decode_worker_id == ""
    assert pair.used_blocks() == 0


async def test_a_stop_string_over_the_first_and_the_second_token_is_found(pair: Bench) -> None:
    text = await pair.text_of(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 10})
    stop = {"max_tokens": 10, "stop": [text[:2]]}
    stream = await pair.generate(prompt="hello", sampling=SEEDED, stopping=stop)
    assert (stream.text, len(stream.token_ids)) == ("", 2)
    assert stream.finished.reason == sampling_pb2.FINISH_REASON_STOP_STRING
    kept = await pair.generate(prompt="hello", sampling=SEEDED, stopping={**stop, "include_stop": True})
    assert kept.text == text[:2]


@pytest.mark.feature("stop strings", engine="simulated", facade="grpc")
async def test_a_stop_string_later_in_the_text_cuts_text_ids_and_usage(pair: Bench) -> None:
    text = await pair.text_of(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 60})
    stop = text[30:34]
    end = text.index(stop) + len(stop)
    stream = await pair.generate(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 60, "stop": [stop]})
    assert stream.text == text[: end - len(stop)]
    assert stream.finished.usage.completion_tokens == len(stream.token_ids) == end
    await eventually(lambda: pair.used_blocks() == 0)


async def test_no_stop_string_ends_an_answer_before_min_tokens(pair: Bench) -> None:
    text = await pair.text_of(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 30})
    stopping = {"max_tokens": 30, "min_tokens": 10, "stop": [text[3:5]]}
    stream = await pair.generate(prompt="hello", sampling=SEEDED, stopping=stopping)
    assert len(stream.token_ids) >= 10


@pytest.mark.feature("stop tokens", engine="simulated", facade="grpc")
async def test_a_stop_token_is_reported_and_has_no_text(pair: Bench) -> None:
    text = await pair.text_of(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 30})
    token_id = ord(text[5])
    stopping = {"max_tokens": 30, "stop_token_ids": [token_id]}
    stream = await pair.generate(prompt="hello", sampling=SEEDED, stopping=stopping)
    assert stream.text == text[: text.index(text[5])]
    assert stream.token_ids[-1] == token_id
    assert stream.finished.stop_token_id == token_id
    assert stream.finished.reason == sampling_pb2.FINISH_REASON_STOP_TOKEN


async def test_the_end_of_sequence_ends_the_answer_and_has_no_text() -> None:
    ending = {"end_probability": 0.2}
    async with bench(simulated("p1", "prefill", **ending), simulated("d1", "decode", **ending)) as running:
        stream = await running.generate(prompt="hello", sampling=SEEDED)
        assert stream.finished.reason == sampling_pb2.FINISH_REASON_END_OF_SEQUENCE
        assert stream.finished.stop_token_id == stream.token_ids[-1] == 256
        assert len(stream.text) == len(stream.token_ids) - 1


@pytest.mark.feature("whole answers", engine="simulated", facade="grpc")
async def test_the_unary_answer_is_the_streams_in_one_message(pair: Bench) -> None:
    request = {"prompt": "hello", "sampling": SEEDED, "stopping": {"max_tokens": 40}, "response": {"logprobs": 2}}
    stream = await pair.generate(**request)
    unary = await pair.stub.GenerateUnary(
        generate_pb2.GenerateUnaryRequest(request=generate_pb2.GenerateRequest(**request))
    )
    assert unary.token.text == stream.text
    assert list(unary.token.token_ids) == stream.token_ids
    assert len(unary.token.logprobs) == 40
    assert unary.finished.usage == stream.finished.usage
    assert unary.started.prompt_tokens == 5


@pytest.mark.feature("seeds", engine="simulated", facade="grpc")
async def test_the_same_seed_gives_the_same_text_and_none_gives_another(pair: Bench) -> None:
    stopping = {"max_tokens": 30}
    same = {await pair.text_of(prompt="hello", sampling=SEEDED, stopping=stopping) for _ in range(3)}
    others = {await pair.text_of(prompt="hello", sampling={"temperature": 1.0}, stopping=stopping) for _ in range(3)}
    assert len(same) == 1
    assert len(others) == 3


@pytest.mark.feature("logprobs", engine="simulated", facade="grpc")
async def test_logprobs_come_with_each_token(pair: Bench) -> None:
    stream = await pair.generate(prompt="hello", stopping={"max_tokens": 12}, response={"logprobs": 3})
    logprobs = [entry for message in stream.messages for entry in message.token.logprobs]
    assert [entry.token_id for entry in logprobs] == stream.token_ids
    assert {len(entry.top) for entry in logprobs} == {3}


@pytest.mark.feature("token ids as the prompt", engine="simulated", facade="grpc")
async def test_token_ids_are_run_as_they_are(pair: Bench) -> None:
    from_text = await pair.generate(prompt="hello", sampling=SEEDED, stopping={"max_tokens": 8})
    from_ids = await pair.generate(token_ids={"ids": list(b"hello")}, sampling=SEEDED, stopping={"max_tokens": 8})
    assert from_ids.token_ids == from_text.token_ids


@pytest.mark.feature("chats", engine="simulated", facade="grpc")
async def test_a_conversation_is_rendered_by_the_models_template(pair: Bench) -> None:
    chat = {"messages": [{"role": "user", "parts": [{"text": "hel"}, {"text": "lo"}]}]}
    tokenized = await pair.stub.Tokenize(tokenize_pb2.TokenizeRequest(chat=chat))
    assert tokenized.text == "user: hello\nassistant: "
    stream = await pair.generate(chat=chat, sampling=SEEDED, stopping={"max_tokens": 8})
    assert stream.started.prompt_tokens == len(tokenized.token_ids)
    as_prompt = await pair.generate(prompt=tokenized.text, sampling=SEEDED, stopping={"max_tokens": 8})
    assert stream.token_ids == as_prompt.token_ids


async def test_a_long_prompt_is_tokenized_like_a_short_one(pair: Bench) -> None:
    stream = await pair.generate(prompt="x" * 8000, stopping={"max_tokens": 2})
    assert stream.finished.usage.prompt_tokens == 8000


@pytest.mark.feature("Tokenize and Detokenize", engine="simulated", facade="grpc")
async def test_tokenize_and_detokenize_are_inverse(pair: Bench) -> None:
    tokenized = await pair.stub.Tokenize(tokenize_pb2.TokenizeRequest(prompt="héllo 你"))
    request = tokenize_pb2.DetokenizeRequest(token_ids=tokenized.token_ids)
    assert (await pair.stub.Detokenize(request)).text == "héllo 你"


async def test_max_tokens_is_what_the_context_leaves_at_most() -> None:
    small = {"max_context_tokens": 32}
    async with bench(simulated("p1", "prefill", **small), simulated("d1", "decode", **small)) as running:
        for stopping in ({}, {"max_tokens": 100}):
            stream = await running.generate(prompt="x" * 20, stopping=stopping)
            assert len(stream.token_ids) == 12
            assert stream.finished.reason == sampling_pb2.FINISH_REASON_LENGTH


@pytest.mark.feature("prefix cache", engine="simulated", facade="grpc")
async def test_a_prompt_computed_before_is_taken_from_the_cache(pair: Bench) -> None:
    await pair.generate(prompt="x" * 64, stopping={"max_tokens": 2})
    stream = await pair.generate(prompt="x" * 64, stopping={"max_tokens": 2})
    assert 0 < stream.finished.usage.cached_tokens < 64


@pytest.mark.feature("timings by stage", engine="simulated", facade="grpc")
async def test_the_timings_has_each_stage_with_the_worker_that_ran_it(pair: Bench) -> None:
    finished = (await pair.generate(prompt="hello", stopping={"max_tokens": 5})).finished
    seen = {
        (timing_pb2.Stage.Name(timing.stage).removeprefix("STAGE_"), timing.worker_id) for timing in finished.timings
    }
    assert {(stage, "") for stage in ("ADMISSION", "TOKENIZE", "ROUTE", "DETOKENIZE", "UNATTRIBUTED")} <= seen
    assert {("PREFILL_QUEUE", "p1"), ("PREFILL_COMPUTE", "p1")} <= seen
    assert {(stage, "d1") for stage in ("HANDOFF_WAIT", "HANDOFF_TRANSFER", "DECODE_QUEUE", "DECODE")} <= seen
    assert finished.timings[-1].stage == timing_pb2.STAGE_UNATTRIBUTED


# Ours writes without waiting, so that no token of a client that reads waits for another one.
async def test_tokens_that_wait_go_out_together(on_grpcio: Bench) -> None:
    stream = await on_grpcio.generate(prompt="hello", stopping={"max_tokens": 2000})
    assert len(stream.token_ids) == 2000
    assert len(stream.messages) < 2000


async def test_streams_that_run_together_do_not_mix(pair: Bench) -> None:
    async def ask(index: int) -> tuple[int, str]:
        request = {"sampling": {"seed": index, "temperature": 1.0}, "stopping": {"max_tokens": 30}}
        return index, await pair.text_of(prompt=f"prompt {index}", **request)

    together = dict(await asyncio.gather(*(ask(index) for index in range(20))))
    for index in (0, 7, 19):
        assert (await ask(index))[1] == together[index]
    await eventually(lambda: pair.used_blocks() == 0)


async def test_a_short_prompt_may_stay_on_its_decode_worker() -> None:
    router = FAST_ROUTER.model_copy(update={"routing": RoutingConfig(policy="least_loaded", local_prefill_tokens=10)})
    async with bench(PREFILL, DECODE, router=router) as running:
        assert (await running.generate(prompt="short", stopping={"max_tokens": 2})).placed == ("", "d1")
        assert (await running.generate(prompt="long enough", stopping={"max_tokens": 2})).placed == ("p1", "d1")


async def test_one_worker_with_both_roles_runs_requests_whole() -> None:
    async with bench(simulated("w1", "prefill", "decode")) as running:
        stream = await running.generate(prompt="hello", stopping={"max_tokens": 4})
        assert stream.placed == ("", "w1")
        assert stream.started.topology == generate_pb2.TOPOLOGY_AGGREGATED
        assert stream.finished.topology == generate_pb2.TOPOLOGY_AGGREGATED


@pytest.mark.feature("sessions", engine="simulated", facade="grpc")
async def test_sessions_stay_on_their_workers() -> None:
    workers = [simulated(f"d{index}", "decode") for index in range(4)]
    async with bench(*workers) as running:
        for key in ("ann", "bob", "eve"):
            request = {"prompt": "hello", "stopping": {"max_tokens": 2}, "routing": {"session_key": key}}
            assert len({(await running.generate(**request)).placed for _ in range(5)}) == 1


async def test_equals_take_turns() -> None:
    async with bench(*[simulated(f"d{index}", "decode") for index in range(3)]) as running:
        placed = {(await running.generate(prompt="hello", stopping={"max_tokens": 2})).placed for _ in range(6)}
        assert len(placed) == 3


@pytest.mark.feature("model list", engine="simulated", facade="grpc")
async def test_the_models_are_listed_with_their_limits_and_workers(pair: Bench) -> None:
    models = (await pair.stub.ListModels(model_pb2.ListModelsRequest())).models
    assert [(model.name, model.prefill_workers, model.decode_workers) for model in models] == [("demo", 1, 1)]
    model = (await pair.stub.GetModel(model_pb2.GetModelRequest())).model
    assert (model.limits.max_context_tokens, model.limits.vocab_size) == (512 * 16, 257)
    assert model.capabilities.chat


async def test_operators_see_every_worker(pair: Bench) -> None:
    seen = [json_format.MessageToDict(worker) for worker in await pair.list_workers()]
    assert [(one["workerId"], one["roles"], one["state"]) for one in seen] == [
        ("d1", ["decode"], "WORKER_STATE_READY"),
        ("p1", ["prefill"], "WORKER_STATE_READY"),
    ]
    assert {one["load"]["blocksTotal"] for one in seen} == {512}


@pytest.mark.parametrize("name", ["", "demo"])
async def test_the_only_model_needs_no_name(pair: Bench, name: str) -> None:
    assert (await pair.generate(prompt="hello", model=name, stopping={"max_tokens": 2})).started.model == "demo"


async def test_a_request_has_one_log_line_that_says_what_became_of_it(pair: Bench) -> None:
    with capture_logs(processors=[merge_log_fields]) as lines:
        await pair.generate(prompt="hello", request_id="mine", stopping={"max_tokens": 7})
    (line,) = [line for line in lines if line.get("method") == "/baton.inference.v1.InferenceService/Generate"]
    expected = {"request_id": "mine", "model": "demo", "outcome": "OK", "prompt_tokens": 5, "completion_tokens": 7}
    assert expected.items() <= line.items()
    assert (line["prefill_worker_id"], line["decode_worker_id"]) == ("p1", "d1")
    assert 0 < line["ttft_seconds"] <= line["total_seconds"]
