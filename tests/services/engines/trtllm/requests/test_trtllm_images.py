"""Images through the TensorRT-LLM engine on the stand-in: encode, prefill and decode behind real gRPC and a router."""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from fake_tensorrt_llm.llm import RUNNING
from fake_tensorrt_llm.mm_encoder import ENCODERS
from fake_tensorrt_llm.shared_tensor import MEMORY
from support.cluster.in_process import Bench, bench
from support.engines import trtllm
from support.engines.checkpoints import DEMO
from support.engines.engine_calls import collect, disaggregated, greedy
from support.eventually import eventually
from support.images.pictures import picture

from baton.errors import EngineFailed, InvalidRequest, Unsupported
from services.config import WorkerConfig
from services.engines.base import Engine
from services.engines.context import EngineContext
from services.engines.prompt import Media, MediaSpan, Prompt
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.encoder import TrtllmEncoder
from services.engines.trtllm.factory import open_trtllm_encoder
from services.engines.trtllm.requests.multimodal import collapsed, hash_of

# Tokens that stay the same when their text is tokenized again.
BEFORE, AFTER, PLACEHOLDER = (1, 300, 301, 302), (303, 304), 6
LETTERS = (90, 78, 75)  # t, h, e: the tokenizer makes two tokens of "the"


def worker(worker_id: str, role: str, inline_bytes: int = 2**20) -> WorkerConfig:
    engine = trtllm.settings(DEMO, name="demo", node_id=int(worker_id[1:]))
    return WorkerConfig.model_validate(
        {
            "worker_id": worker_id,
            "roles": [role],
            "engine": engine,
            "encode": {"inline_bytes": inline_bytes},
            "handoff": {"lease_seconds": trtllm.TRANSFER_SECONDS / 2},
            "drain_seconds": 0,
        }
    )


@asynccontextmanager
async def three_workers() -> AsyncIterator[Bench]:
    async with bench(worker("e1", "encode", 0), worker("p2", "prefill"), worker("d3", "decode")) as running:
        yield running


@pytest_asyncio.fixture
async def trio(newest: None) -> AsyncIterator[Bench]:
    async with three_workers() as running:
        yield running


@pytest_asyncio.fixture
async def encoder(newest: None) -> AsyncIterator[TrtllmEncoder]:
    async with open_trtllm_encoder(TrtllmConfig.model_validate(trtllm.settings(DEMO)), EngineContext()) as opened:
        assert isinstance(opened, TrtllmEncoder)
        yield opened


@pytest_asyncio.fixture
async def engine(newest: None) -> AsyncIterator[Engine]:
    async with trtllm.open_engine(DEMO) as opened:
        yield opened


def about(*files: bytes, max_tokens: int = 8, **fields: object) -> dict[str, object]:
    return {
        "prompt": "look at " + "<image>" * len(files) + " and tell",
        "media": [{"data": file} for file in files],
        "sampling": {"temperature": 0.0},
        "stopping": {"max_tokens": max_tokens, "ignore_eos": True},
        **fields,
    }


async def illustrated(encoder: TrtllmEncoder, *files: bytes, text: Sequence[int] = BEFORE) -> Prompt:
    """Text, then the pictures."""
    ids, media = list(text), []
    for embedding in await encoder.encode([Media(file, "image/png") for file in files]):
        media.append(MediaSpan(len(ids), embedding.shape[0], embedding.digest, embedding))
        ids += [PLACEHOLDER] * embedding.shape[0]
    return Prompt((*ids, *AFTER), media=tuple(media))


async def test_an_answer_about_pictures_over_three_workers_is_that_of_two(version: str) -> None:
    files = (picture(), picture(width=33))
    async with three_workers() as trio:
        apart = await trio.generate(**about(*files))
        whole = await trio.generate(**about(*files), routing={"topology": "TOPOLOGY_AGGREGATED"})
    assert apart.placed == ("p2", "d3")
    assert whole.placed == ("", "d3")
    assert apart.token_ids == whole.token_ids
    assert len(apart.token_ids) == 8


async def test_another_picture_has_another_answer(trio: Bench) -> None:
    first = await trio.generate(**about(picture()))
    second = await trio.generate(**about(picture(width=33)))
    assert first.token_ids != second.token_ids


async def test_a_picture_that_is_asked_about_twice_is_encoded_once(trio: Bench) -> None:
    looked = len(ENCODERS[0].batches)
    first = await trio.generate(**about(picture()))
    again = await trio.generate(**about(picture()))
    assert first.token_ids == again.token_ids
    assert len(ENCODERS[0].batches) == looked + 1


async def test_blocks_with_a_picture_are_found_again_with_the_same_picture_only(trio: Bench) -> None:
    text = "look at <image> and tell what it is, and where it is, and how many of it there are " * 2
    asked = {**about(picture(), picture()), "prompt": text}
    first = await trio.generate(**asked)
    again = await trio.generate(**asked)
    other = await trio.generate(**{**asked, "media": [{"data": picture(width=33)}] * 2})
    assert first.finished.usage.cached_tokens == 0
    assert again.finished.usage.cached_tokens > other.finished.usage.cached_tokens


async def test_the_encoder_gets_its_memory_back_and_no_handle_is_left(trio: Bench) -> None:
    await trio.generate(**about(picture()))
    assert ENCODERS[0].unread == 0
    assert not MEMORY


async def test_equal_pictures_have_equal_embeddings_and_others_have_not(encoder: TrtllmEncoder) -> None:
    one, same, other = await encoder.encode(
        [Media(file, "image/png") for file in (picture(), picture(), picture(width=40))]
    )
    assert one == same
    assert one.digest != other.digest
    row = len(one.data) // one.shape[0]
    assert one.data[:row] != other.data[:row]


async def test_images_of_a_call_are_encoded_in_batches(encoder: TrtllmEncoder) -> None:
    size = ENCODERS[0].given["max_batch_size"]
    await encoder.encode([Media(picture(), "image/png")] * (size + 1))
    assert ENCODERS[0].batches[-2:] == [size, 1]


async def test_an_image_that_cannot_be_read_is_the_clients_fault(encoder: TrtllmEncoder) -> None:
    with pytest.raises(InvalidRequest, match=r"media\[0\]"):
        await encoder.encode([Media(b"no image", "image/png")])
    assert encoder.healthy


async def test_a_fatal_error_of_the_encoder_fails_it_for_good(encoder: TrtllmEncoder) -> None:
    ENCODERS[0].crash = RuntimeError("CUDA error")
    with pytest.raises(EngineFailed, match="CUDA error"):
        await encoder.encode([Media(picture(), "image/png")])
    ENCODERS[0].crash = None
    assert not encoder.healthy


async def test_an_encoder_that_never_ends_is_found_out(newest: None) -> None:
    config = TrtllmConfig.model_validate(trtllm.settings(DEMO, stall_seconds=1.1))
    async with open_trtllm_encoder(config, EngineContext()) as encoder:
        ENCODERS[0].seconds = 2.0
        encoding = asyncio.create_task(encoder.encode([Media(picture(), "image/png")]))
        await eventually(lambda: not encoder.healthy)
        await encoding


async def test_images_wait_until_a_batch_that_was_cancelled_is_over(encoder: TrtllmEncoder) -> None:
    ENCODERS[0].seconds = 0.2
    encoding = asyncio.create_task(encoder.encode([Media(picture(), "image/png")]))
    await eventually(lambda: encoder.load().running == 1)
    encoding.cancel()
    await encoder.encode([Media(picture(), "image/png")])
    assert ENCODERS[0].most_at_once == 1


async def test_blocks_of_equal_images_are_found_again_by_their_digest() -> None:
    digest = bytes(range(32))
    assert struct.pack("<8i", *hash_of(digest)) == digest


async def test_a_prompt_of_ids_becomes_text_with_one_placeholder_for_each_image(encoder: TrtllmEncoder) -> None:
    prompt = await illustrated(encoder, picture(), picture(width=33))
    assert collapsed(prompt) == (*BEFORE, PLACEHOLDER, PLACEHOLDER, *AFTER)


async def test_a_prompt_is_prefilled_with_its_images_and_decoded_without(
    encoder: TrtllmEncoder, engine: Engine
) -> None:
    prompt = await illustrated(encoder, picture())
    whole = (await collect(engine.decode(prompt, greedy(9)))).ids
    async with trtllm.open_engine(DEMO) as decoder:
        assert await disaggregated(engine, decoder, prompt, greedy(9)) == whole[1:]


async def test_ids_that_no_text_becomes_are_refused_beside_images(encoder: TrtllmEncoder, engine: Engine) -> None:
    prompt = await illustrated(encoder, picture(), text=(1, *LETTERS))
    with pytest.raises(Unsupported, match="no text becomes these token ids"):
        await collect(engine.decode(prompt, greedy(2)))


async def test_a_prompt_that_the_engine_makes_other_tokens_of_fails(encoder: TrtllmEncoder, engine: Engine) -> None:
    prompt = await illustrated(encoder, picture())
    RUNNING[0].tokens_added = (9,)
    with pytest.raises(EngineFailed, match="other tokens of the prompt"):
        await engine.prefill(prompt, greedy(2))
    assert engine.healthy
