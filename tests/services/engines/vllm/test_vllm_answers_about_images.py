"""Answers about images on vLLM: encoded by Baton, computed and decoded by one or two engines, as vLLM alone answers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from io import BytesIO

import grpc
import pytest
import pytest_asyncio
from PIL import Image
from prometheus_client import REGISTRY as LIBRARY_REGISTRY
from support.cluster.in_process import PATIENT, Bench, Stream, bench
from support.engines import vllm
from support.engines.checkpoints import DEMO
from support.engines.engine_calls import collect, disaggregated, fetch, greedy, without_embeddings
from support.eventually import PATIENCE_SECONDS, eventually
from support.images.demo_questions import MAX_TOKENS, Question, as_prompt, questions
from tokenizers import Tokenizer

from baton.errors import HandoffLost, Unsupported
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import media_pb2
from engine_protocol.prefix_hash import block_hashes
from models.demo.exercises.exercise import IMAGE
from models.demo.exercises.generate_data import raw_prompt
from runtime.aio import timeout
from services.config import WorkerConfig
from services.engines.kv_events import KvChanged, KvSnapshot
from services.engines.prompt import Media, MediaSpan, Prompt
from services.engines.vllm.engine import VllmEngine
from services.engines.vllm.package import open_vllm_package

pytestmark = [pytest.mark.requires_vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
ASKED = questions(10, "vllm")
IMAGE_ID = TOKENIZER.token_to_id(IMAGE)
IMAGE_TOKENS = 16
AGGREGATED, DISAGGREGATED = pb.TOPOLOGY_AGGREGATED, pb.TOPOLOGY_DISAGGREGATED


def worker(worker_id: str, role: str) -> WorkerConfig:
    engine = {**vllm.settings(DEMO), "name": "demo"}
    handoff = {"lease_seconds": vllm.LEASE_SECONDS}
    settings = {"worker_id": worker_id, "roles": [role], "engine": engine, "handoff": handoff, "drain_seconds": 0}
    return WorkerConfig.model_validate(settings)


def answers_of_vllm_alone(asked: Sequence[Question]) -> list[list[int]]:
    """The ids that vLLM generates from the pixels, which its own processor and vision encoder read."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(DEMO),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        block_size=vllm.BLOCK_TOKENS,
        kv_cache_memory_bytes=1 << 29,
        gpu_memory_utilization=0.06 if vllm.ON_GPU else 0.9,
        limit_mm_per_prompt={"image": 2},
    )
    prompts = [
        {
            "prompt_token_ids": TOKENIZER.encode(raw_prompt(each.exercise), add_special_tokens=False).ids,
            "multi_modal_data": {"image": list(each.pictures)},
        }
        for each in asked
    ]
    try:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        llm.llm_engine.engine_core.shutdown()


@dataclass(frozen=True)
class Served:
    """A cluster of an encode, a prefill and a decode worker on vLLM, and vLLM's own answers to ASKED."""

    bench: Bench
    expected: list[list[int]]

    def engine(self, worker_id: str) -> VllmEngine:
        engine = self.bench.workers[worker_id].engines.engine
        assert isinstance(engine, VllmEngine)
        return engine

    async def ask(self, request: pb.GenerateRequest, topology: "pb.Topology.ValueType" = pb.TOPOLOGY_ANY) -> Stream:
        request.routing.topology = topology
        return Stream([message async for message in self.bench.stub.Generate(request, timeout=PATIENCE_SECONDS)])

    async def prompt(self, text: str, *files: bytes) -> Prompt:
        """A prompt with the embeddings of files, for engines."""
        encoding = self.bench.workers["e1"].engines.encoding
        assert encoding is not None
        embeddings = await encoding.encoder.encode([Media(file, "image/png") for file in files])
        ids: list[int] = []
        spans: list[MediaSpan] = []
        for token in TOKENIZER.encode(text).ids:
            if token == IMAGE_ID:
                embedding = embeddings[len(spans)]
                spans.append(MediaSpan(len(ids), IMAGE_TOKENS, embedding.digest, embedding))
            ids += [token] * (IMAGE_TOKENS if token == IMAGE_ID else 1)
        return Prompt(tuple(ids), media=tuple(spans))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    with vllm.installed():
        open_vllm_package()  # it sets the environment of vLLM's processes
        alone = asyncio.create_task(asyncio.to_thread(answers_of_vllm_alone, ASKED))
        workers = [worker("e1", "encode"), worker("p1", "prefill"), worker("d1", "decode")]
        async with bench(*workers, router=PATIENT, proxied=False) as running:
            yield Served(running, await alone)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def frees_everything(served: Served) -> AsyncIterator[None]:
    yield
    await eventually(lambda: served.bench.used_blocks() == 0, seconds=2 * vllm.HELD_SECONDS)


def _colour(red: int, green: int, blue: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (64, 64), (red, green, blue)).save(file, "PNG")
    return file.getvalue()


RED, BLUE = _colour(220, 20, 20), _colour(20, 20, 220)
LONG = f"{IMAGE}\nWhat is in the picture? " + "Look at it, and look again. " * 4


@pytest.mark.feature("images", engine="vllm", facade="grpc")
@pytest.mark.parametrize("topology", [AGGREGATED, DISAGGREGATED], ids=["aggregated", "disaggregated"])
async def test_answers_equal_those_of_vllm_alone_with_the_pixels(
    served: Served, topology: "pb.Topology.ValueType"
) -> None:
    alone = [await served.ask(as_prompt(each), topology) for each in ASKED]
    together = await asyncio.gather(*(served.ask(as_prompt(each), topology) for each in ASKED))
    assert [answer.token_ids for answer in alone] == served.expected
    assert [answer.token_ids for answer in together] == served.expected
    assert any(len(each.pictures) == 2 for each in ASKED)
    assert len({tuple(ids) for ids in served.expected}) > len(ASKED) // 2
    longer = [answer for answer in [*alone, *together] if len(answer.token_ids) > 1]
    assert {answer.finished.topology for answer in longer} == {topology}
    assert {answer.finished.migrations for answer in longer} == {0}


@pytest.mark.feature("embedding cache of images", engine="vllm", facade="grpc")
async def test_the_same_image_is_encoded_once(served: Served) -> None:
    [asked] = questions(1, "once")
    first, second = [await served.ask(as_prompt(asked)) for _ in range(2)]
    assert (first.started.encoding, second.started.encoding) == (pb.ENCODING_WORKER, pb.ENCODING_CACHED)
    assert list(first.started.encode_worker_ids) == ["e1"]
    assert second.token_ids == first.token_ids


async def test_prompts_that_differ_in_their_image_alone_share_no_blocks(served: Served) -> None:
    engine = served.engine("d1")
    red, blue = [await served.prompt(LONG, file) for file in (RED, BLUE)]
    assert red.token_ids == blue.token_ids
    answers = [await collect(engine.decode(prompt, greedy(4))) for prompt in (red, blue, red)]
    assert [answer.finished.cached_tokens for answer in answers] == [0, 0, 64]
    salted = [await collect(engine.decode(replace(each, cache_salt="new"), greedy(4))) for each in (red, blue)]
    assert [answer.ids for answer in salted] == [answer.ids for answer in answers[:2]]


async def test_the_cache_of_an_engine_has_the_names_that_routers_compute(served: Served) -> None:
    engine = served.engine("d1")
    prompts = [await served.prompt(f"Two: {IMAGE}{IMAGE} " + LONG, *files) for files in _orders(RED, BLUE)]
    for prompt in prompts:
        await collect(engine.decode(prompt, greedy(2)))
    names = [set(block_hashes(each.token_ids, vllm.BLOCK_TOKENS, media=each.media)) for each in prompts]
    assert not names[0] & names[1]
    assert all(len(each) == len(prompts[0].token_ids) // vllm.BLOCK_TOKENS for each in names)
    async with timeout(PATIENCE_SECONDS), aclosing(engine.kv_changes()) as changes:
        found: set[bytes] = set()
        while not names[0] | names[1] <= found:
            match await anext(changes):
                case KvSnapshot(block_hashes=hashes) | KvChanged(stored=hashes):
                    found.update(hashes)


def _orders(one: bytes, other: bytes) -> list[tuple[bytes, bytes, bytes]]:
    return [(one, other, one), (other, one, one)]


async def test_a_handoff_needs_no_embeddings_and_leaves_no_block_that_others_find(served: Served) -> None:
    prefill, decode = served.engine("p1"), served.engine("d1")
    red, blue = [replace(await served.prompt(LONG, file), cache_salt="handed") for file in (RED, BLUE)]
    for prompt in (red, blue):
        expected = (await collect(prefill.decode(prompt, greedy(12)))).ids
        assert await disaggregated(prefill, decode, prompt, greedy(12)) == expected[1:]
        assert (await collect(decode.decode(prompt, greedy(12)))).ids == expected


async def test_a_prompt_that_ends_with_an_image_is_answered_where_it_is_computed(served: Served) -> None:
    prompt = await served.prompt(f"Look: {IMAGE}", RED)
    with pytest.raises(Unsupported, match=r"prompt\.media: .* ends with an image"):
        await served.engine("p1").prefill(prompt, greedy(3))
    assert len((await collect(served.engine("p1").decode(prompt, greedy(3)))).ids) == 3


async def test_a_preempted_decode_without_embeddings_is_lost_and_never_wrong(served: Served) -> None:
    prefill, decode = served.engine("p1"), served.engine("d1")
    sampling = greedy(150)
    prompts = [replace(await served.prompt(LONG, file), cache_salt=f"{n}") for n, file in enumerate([RED, BLUE] * 3)]
    expected = [(await collect(prefill.decode(prompt, sampling))).ids for prompt in prompts]

    async def decoded(prompt: Prompt) -> tuple[int, ...] | None:
        held = await prefill.prefill(prompt, sampling)
        following = replace(without_embeddings(prompt), emitted=(held.first_token,))
        ids: list[int] = []
        try:
            async for event in await fetch(held, decode, following, sampling):
                ids += getattr(event, "ids", ())
        except HandoffLost:
            assert tuple(ids) == expected[prompts.index(prompt)][1 : len(ids) + 1]
            return None
        return (held.first_token, *ids)

    found = await asyncio.gather(*map(decoded, prompts))
    assert None in found
    assert all(ids in (None, right) for ids, right in zip(found, expected, strict=True))
    whole = [(await collect(decode.decode(prompt, greedy(20)))).ids for prompt in prompts]
    assert whole == [ids[:20] for ids in expected]


async def test_routers_have_answers_that_were_lost_by_preemption_computed_again(served: Served) -> None:
    asked = [as_prompt(each) for each in questions(6, "preempted")]
    for request in asked:
        request.stopping.ignore_eos, request.stopping.max_tokens = True, 150
    alone = [await served.ask(request) for request in asked]
    before = _preemptions()
    together = await asyncio.gather(*map(served.ask, asked))
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert _preemptions() > before


async def test_a_preempted_request_with_embeddings_is_right_also_where_its_image_was_cached(served: Served) -> None:
    engine, sampling = served.engine("d1"), greedy(150)
    prompts = [await served.prompt(f"{LONG} {number}", file) for number, file in enumerate([RED, BLUE] * 3)]
    expected = [(await collect(engine.decode(prompt, sampling))).ids for prompt in prompts]
    before = _preemptions()
    found = await asyncio.gather(*(collect(engine.decode(prompt, sampling)) for prompt in prompts))
    assert [answer.ids for answer in found] == expected
    assert any(answer.finished.cached_tokens for answer in found)
    assert _preemptions() > before


def _preemptions() -> float:
    families = [family for family in LIBRARY_REGISTRY.collect() if family.name == "vllm:num_preemptions"]
    return sum(each.value for family in families for each in family.samples if each.name.endswith("_total"))


async def test_a_cancelled_request_frees_its_blocks(served: Served) -> None:
    calls = []
    for seed in range(6):
        [asked] = questions(1, f"cancelled {seed}")
        request = as_prompt(asked)
        request.stopping.ignore_eos, request.stopping.max_tokens = True, 150
        calls.append(served.bench.stub.Generate(request, timeout=PATIENCE_SECONDS))
    for turn, call in enumerate(calls):
        await asyncio.sleep(0.02 * turn)
        call.cancel()
    await eventually(lambda: served.bench.used_blocks() == 0, seconds=2 * vllm.HELD_SECONDS)
    assert (await served.ask(as_prompt(ASKED[0]))).token_ids == served.expected[0]


@pytest.mark.parametrize(
    ("media", "code", "field"),
    [
        ([b"not an image"], grpc.StatusCode.INVALID_ARGUMENT, "media[0]"),
        ([RED[:60]], grpc.StatusCode.INVALID_ARGUMENT, "media[0]"),
        ([RED, BLUE], grpc.StatusCode.INVALID_ARGUMENT, "media"),
        ([RED] * 17, grpc.StatusCode.INVALID_ARGUMENT, "media"),
    ],
    ids=["no image", "truncated", "more than placeholders", "more than the limit"],
)
async def test_images_that_cannot_be_used_are_refused_by_their_field(
    served: Served, media: list[bytes], code: grpc.StatusCode, field: str
) -> None:
    items = [media_pb2.MediaItem(data=content) for content in media]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.ask(pb.GenerateRequest(prompt=f"{IMAGE}\nWhat is it?", media=items))
    assert (caught.value.code(), field in str(caught.value.details())) == (code, True)
