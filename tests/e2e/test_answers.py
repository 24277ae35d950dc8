"""Answers of the demonstration model from real processes: text, streaming, and where it ends."""

from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import pytest_asyncio
from support.clients.generation import generate, generate_all, greedy_text
from support.cluster.fleet import PATIENT, Fleet, FleetPlan, overrides, shared_fleet
from support.engines.checkpoints import DEMO
from support.engines.guided import TOKENIZER
from support.servers.etcd import EtcdServer

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import sampling_pb2, tokenize_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub

# Many processes share two cores: slow is not wrong.
pytestmark = pytest.mark.timeout(400)

STORY = "Tell a story about Mia and a fox."


@pytest.fixture(scope="module")
def demo(shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    engine = {"kind": "pytorch", "model": DEMO, "name": "demo", "threads": 1}
    plan = FleetPlan("answers", shared_etcd.endpoint, overrides("engine", engine), (PATIENT,), prefill=1, decode=1)
    with shared_fleet(plan, tmp_path_factory.mktemp("answers")) as running:
        yield running


@pytest_asyncio.fixture
async def stub(demo: Fleet) -> AsyncIterator[InferenceServiceStub]:
    async with grpc.aio.insecure_channel(demo.router.address) as channel:
        yield InferenceServiceStub(channel)


def chat(text: str) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", parts=[pb.ContentPart(text=text)])
    request = pb.GenerateRequest(chat=pb.ChatInput(messages=[message]))
    request.sampling.temperature = 0
    return request


@pytest.mark.feature("text prompts", engine="pytorch", facade="grpc")
@pytest.mark.feature("streaming", engine="pytorch", facade="grpc")
async def test_a_prompt_is_answered(stub: InferenceServiceStub) -> None:
    answer = await generate(stub, greedy_text("Sort: pear apple mango"))
    assert answer.text == "apple mango pear"
    assert answer.finished.reason == sampling_pb2.FINISH_REASON_END_OF_SEQUENCE


@pytest.mark.feature("chats", engine="pytorch", facade="grpc")
async def test_a_chat_is_answered(stub: InferenceServiceStub) -> None:
    assert (await generate(stub, chat("Sort: pear apple mango"))).text == "apple mango pear"


@pytest.mark.feature("prefill and decode on different workers", engine="pytorch", facade="grpc")
async def test_the_answer_was_prefilled_and_decoded_by_different_workers(stub: InferenceServiceStub) -> None:
    finished = (await generate(stub, greedy_text(STORY, 128))).finished
    assert finished.topology == pb.TOPOLOGY_DISAGGREGATED
    assert (finished.prefill_worker_id, finished.decode_worker_id) == ("prefill-0", "decode-0")


async def test_a_long_answer_comes_in_many_messages_counted_without_gaps(stub: InferenceServiceStub) -> None:
    answer = await generate(stub, greedy_text(STORY, 128))
    assert [message.sequence for message in answer.messages] == list(range(len(answer.messages)))
    assert len(answer.messages) > 10
    assert answer.finished.usage.completion_tokens == len(answer.ids) > 80


async def test_one_token_at_most_is_one_token(stub: InferenceServiceStub) -> None:
    whole = await generate(stub, greedy_text(STORY, 128))
    first = await generate(stub, greedy_text(STORY, 1))
    assert first.ids == whole.ids[:1]
    assert first.finished.reason == sampling_pb2.FINISH_REASON_LENGTH
    assert first.finished.decode_worker_id == ""


@pytest.mark.feature("stop tokens", engine="pytorch", facade="grpc")
async def test_a_stop_token_that_comes_first_ends_the_answer_there(stub: InferenceServiceStub) -> None:
    whole = await generate(stub, greedy_text(STORY, 128))
    request = greedy_text(STORY, 128)
    request.stopping.stop_token_ids.append(whole.ids[0])
    answer = await generate(stub, request)
    assert answer.ids == whole.ids[:1]
    assert answer.finished.reason == sampling_pb2.FINISH_REASON_STOP_TOKEN


@pytest.mark.feature("stop strings", engine="pytorch", facade="grpc")
async def test_a_stop_string_over_the_first_and_second_token_ends_the_answer_before_it(
    stub: InferenceServiceStub,
) -> None:
    whole = await generate(stub, greedy_text("Repeat: kite drum lamp", 32))
    start = [await _text_of(stub, whole.ids[:count]) for count in (1, 2)]
    request = greedy_text("Repeat: kite drum lamp", 32)
    # From within the first token's text into the second's.
    request.stopping.stop.append(start[1][len(start[0]) - 1 : len(start[0]) + 1])
    answer = await generate(stub, request)
    assert answer.text == start[0][:-1]
    assert answer.finished.reason == sampling_pb2.FINISH_REASON_STOP_STRING
    assert answer.finished.stop_string == request.stopping.stop[0]


@pytest.mark.feature("bad words", engine="pytorch", facade="grpc")
async def test_bad_words_never_come_of_texts_and_of_ids(stub: InferenceServiceStub) -> None:
    whole = await generate(stub, greedy_text(STORY, 128))
    assert " fox" in whole.text
    request = greedy_text(STORY, 128)
    request.sampling.bad_words.append("fox")
    answer = await generate(stub, request)
    assert answer.finished.topology == pb.TOPOLOGY_DISAGGREGATED
    assert answer.text[: whole.text.index(" fox")] == whole.text[: whole.text.index(" fox")]
    [banned] = TOKENIZER.encode(" fox", add_special_tokens=False).ids
    assert banned in whole.ids
    assert banned not in answer.ids
    ids = (await stub.Tokenize(tokenize_pb2.TokenizeRequest(prompt=STORY))).token_ids
    request.token_ids.ids.extend(ids)
    assert (await generate(stub, request)).ids == answer.ids


@pytest.mark.feature("seeds", engine="pytorch", facade="grpc")
async def test_a_seed_gives_the_same_tokens_alone_and_among_others(stub: InferenceServiceStub) -> None:
    def sampled(seed: int) -> pb.GenerateRequest:
        request = greedy_text(STORY, 48)
        request.sampling.temperature = 8  # the model is very sure of itself
        request.sampling.seed = seed
        return request

    alone = [await generate(stub, sampled(seed)) for seed in range(4)]
    together = await generate_all(stub, [sampled(seed) for seed in range(16)], at_once=16)
    assert [answer.ids for answer in alone] == [answer.ids for answer in together[:4]]
    assert len({answer.ids for answer in together}) > 8


@pytest.mark.feature("prefix cache", engine="pytorch", facade="grpc")
async def test_a_prompt_seen_before_is_taken_from_the_cache(stub: InferenceServiceStub) -> None:
    request = greedy_text("Repeat: " + " ".join(["kite"] * 60), 4)
    first, second = [(await generate(stub, request)).finished.usage for _ in range(2)]
    assert first.cached_tokens < second.cached_tokens <= second.prompt_tokens


async def test_text_deltas_add_up_to_what_the_ids_say(stub: InferenceServiceStub) -> None:
    answer = await generate(stub, greedy_text(STORY, 128))
    assert answer.text == await _text_of(stub, answer.ids)


async def _text_of(stub: InferenceServiceStub, ids: tuple[int, ...]) -> str:
    return (await stub.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=ids))).text
