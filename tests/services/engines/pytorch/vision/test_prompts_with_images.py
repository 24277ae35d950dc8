"""Images in the embedded engine: encoded, prefilled and decoded apart, the ids equal those of the plain model."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from support.clients.scraping import since
from support.engines.checkpoints import DEMO
from support.engines.device import EXECUTION, ON_DEVICE
from support.engines.engine_calls import collect, disaggregated, pull, without_embeddings
from support.eventually import eventually
from support.images.prompts import PlainVision, Question, encoded_prompt, png, questions, scene_png

from baton.errors import ConfigError, HandoffLost, InvalidRequest, Overloaded
from services.engines.kv import PulledKv
from services.engines.prompt import Media, Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.vision.encoder import PyTorchEncoder

GREEDY = Sampling(max_tokens=40, temperature=0.0)


def config(**options: object) -> PyTorchConfig:
    defaults: dict[str, object] = {**ON_DEVICE, "execution": EXECUTION, "threads": 1, "kv_cache_bytes": 16 << 20}
    return PyTorchConfig.model_validate({"model": DEMO, **defaults, **options})


@pytest.fixture(scope="session")
def plain() -> PlainVision:
    return PlainVision(DEMO)


@pytest.fixture(scope="session")
def asked(plain: PlainVision) -> list[tuple[Question, tuple[int, ...]]]:
    """Thirty questions, and the plain model's ids."""
    return [(question, plain.generate(question, GREEDY.max_tokens)) for question in questions(30)]


@pytest_asyncio.fixture
async def encoder() -> AsyncIterator[PyTorchEncoder]:
    async with PyTorchEncoder(config()) as opened:
        yield opened
        assert opened.load().running == opened.load().waiting == 0


async def prompts_of(encoder: PyTorchEncoder, plain: PlainVision, asked: list) -> list[Prompt]:
    return list(
        await asyncio.gather(
            *(encoded_prompt(encoder, plain.token_ids(question), question.pictures) for question, _ in asked)
        )
    )


def first_and_rest(expected: tuple[int, ...]) -> tuple[int, ...]:
    return expected[1:]


async def test_thirty_image_prompts_decode_elsewhere_to_the_plain_models_ids(encoder, plain, asked) -> None:
    prompts = await prompts_of(encoder, plain, asked)
    assert sum(len(prompt.media) == 2 for prompt in prompts) >= 4
    async with PyTorchEngine(config()) as prefill, PyTorchEngine(config()) as decode:
        rest = [await disaggregated(prefill, decode, prompt, GREEDY) for prompt in prompts]
    assert rest == [first_and_rest(expected) for _, expected in asked]


async def test_sixteen_image_prompts_at_a_time_have_the_same_ids_in_small_chunks_and_blocks(
    encoder, plain, asked
) -> None:
    prompts = await prompts_of(encoder, plain, asked)
    small = config(block_tokens=8, max_step_tokens=21, max_sequences=16)
    async with PyTorchEngine(small) as prefill, PyTorchEngine(small) as decode:
        gate = asyncio.Semaphore(16)

        async def one(prompt: Prompt) -> tuple[int, ...]:
            async with gate:
                return await disaggregated(prefill, decode, prompt, GREEDY)

        rest = await asyncio.gather(*map(one, prompts))
    assert rest == [first_and_rest(expected) for _, expected in asked]


async def test_answers_are_right(plain, asked) -> None:
    right = sum(plain.text(ids) == question.answer for question, ids in asked)
    assert right >= 29


async def test_a_whole_decode_of_an_image_prompt_and_its_repetition_from_the_cache_have_the_plain_ids(
    encoder, plain, asked
) -> None:
    prompts = await prompts_of(encoder, plain, asked[:8])
    async with PyTorchEngine(config(block_tokens=4)) as engine:
        first = [await collect(engine.decode(prompt, GREEDY)) for prompt in prompts]
        again = [await collect(engine.decode(prompt, GREEDY)) for prompt in prompts]
    assert [generated.ids for generated in first] == [expected for _, expected in asked[:8]]
    assert [generated.ids for generated in again] == [generated.ids for generated in first]
    assert all(
        generated.finished.cached_tokens >= len(prompt.token_ids) - 4
        for generated, prompt in zip(again, prompts, strict=True)
    )


async def test_the_same_text_with_another_image_never_hits_the_cache(encoder, plain) -> None:
    [question] = questions(1)
    other = replace(question, pictures=questions(2, seed=9)[1].pictures[:1])
    ids = plain.token_ids(question)
    async with PyTorchEngine(config(block_tokens=4)) as engine:
        await collect(engine.decode(await encoded_prompt(encoder, ids, question.pictures), GREEDY))
        generated = await collect(engine.decode(await encoded_prompt(encoder, ids, other.pictures), GREEDY))
    before_the_image = ids.index(6)
    assert generated.finished.cached_tokens <= before_the_image
    assert generated.ids == plain.generate(other, GREEDY.max_tokens)


async def test_swapped_images_do_not_hit_each_others_cache(encoder, plain) -> None:
    question = questions(7)[6]
    swapped = replace(question, pictures=question.pictures[::-1])
    ids = plain.token_ids(question)
    async with PyTorchEngine(config(block_tokens=4)) as engine:
        await collect(engine.decode(await encoded_prompt(encoder, ids, question.pictures), GREEDY))
        generated = await collect(engine.decode(await encoded_prompt(encoder, ids, swapped.pictures), GREEDY))
    assert generated.ids == plain.generate(swapped, GREEDY.max_tokens)


async def test_a_lost_decode_continues_from_the_ids_and_the_embeddings(encoder, plain, asked) -> None:
    question, expected = asked[0]
    prompt = await encoded_prompt(encoder, plain.token_ids(question), question.pictures)
    async with PyTorchEngine(config()) as engine:
        rest = await collect(engine.decode(replace(prompt, emitted=expected[:3]), GREEDY))
    assert rest.ids == expected[3:]


async def test_a_starved_pool_preempts_image_prompts_that_are_run_here_and_the_ids_stay_right(
    encoder, plain, asked
) -> None:
    prompts = await prompts_of(encoder, plain, asked[:6])
    sampling = replace(GREEDY, ignore_eos=True)
    async with PyTorchEngine(config(block_tokens=4, prefix_cache=False)) as roomy:
        expected = [(await collect(roomy.decode(prompt, sampling))).ids for prompt in prompts]
    # The bytes of 40 blocks of 4 tokens: about two of the prompts with their answers.
    starved = config(block_tokens=4, kv_cache_bytes=40 * 6 * 2 * 2 * 4 * 32 * 4, max_context_tokens=128)
    preemptions = since("baton_preemptions_total")
    async with PyTorchEngine(starved) as engine:
        got = await asyncio.gather(*(collect(engine.decode(prompt, sampling)) for prompt in prompts))
        assert preemptions.grown > 0
    assert [generated.ids for generated in got] == expected


async def test_an_imported_image_prompt_keeps_its_blocks_and_newer_ones_give_way(encoder, plain, asked) -> None:
    prompts = await prompts_of(encoder, plain, asked[:2])
    sampling = replace(GREEDY, ignore_eos=True)
    async with PyTorchEngine(config(block_tokens=4)) as roomy:
        expected = [(await collect(roomy.decode(prompt, sampling))).ids for prompt in prompts]
    tight = config(block_tokens=4, kv_cache_bytes=28 * 6 * 2 * 2 * 4 * 32 * 4, max_context_tokens=100)
    preemptions = since("baton_preemptions_total")
    async with PyTorchEngine(config(block_tokens=4)) as prefill, PyTorchEngine(tight) as decode:
        both = asyncio.gather(
            disaggregated(prefill, decode, prompts[0], sampling), collect(decode.decode(prompts[1], sampling))
        )
        imported, whole = await both
    assert imported == expected[0][1:]
    assert whole.ids == expected[1]
    assert preemptions.grown > 0


async def test_imported_image_prompts_that_all_lack_room_end_as_lost_and_the_rest_go_on(encoder, plain, asked) -> None:
    prompts = await prompts_of(encoder, plain, asked[:2])
    sampling = replace(GREEDY, ignore_eos=True)
    tight = config(block_tokens=4, kv_cache_bytes=20 * 6 * 2 * 2 * 4 * 32 * 4, max_context_tokens=76)
    async with PyTorchEngine(config(block_tokens=4)) as prefill, PyTorchEngine(tight) as decode:
        ended = await asyncio.gather(
            *(disaggregated(prefill, decode, prompt, sampling) for prompt in prompts), return_exceptions=True
        )
        await eventually(lambda: decode.load().blocks_used == 0)
    assert sorted(type(one) for one in ended if isinstance(one, BaseException)) in ([], [HandoffLost])
    assert any(isinstance(one, tuple) and len(one) == 39 for one in ended)


async def test_the_encoder_has_the_eyes_only_and_the_engine_all_but_the_eyes(encoder) -> None:
    parts = {name.split(".")[1] for name in encoder.module.state_dict()}
    assert parts == {"vision_tower", "multi_modal_projector"}
    assert sum(weight.numel() for weight in encoder.module.parameters()) == 956_032
    async with PyTorchEngine(config()) as engine:
        module = engine.module
        assert {".".join(name.split(".")[:2]) for name in module.state_dict()} == {
            "model.language_model",
            "lm_head.weight",
        }
        assert sum(weight.numel() for weight in module.parameters()) == 2_656_704


async def test_equal_images_have_equal_digests_and_others_do_not(encoder) -> None:
    same, again, other = await encoder.encode([Media(scene_png(seed), "image/png") for seed in (1, 1, 2)])
    assert same.digest == again.digest != other.digest
    assert same.data != other.data


async def test_the_digest_depends_on_what_encodes(encoder) -> None:
    async with PyTorchEncoder(config(dtype="bfloat16")) as coarse:
        [one], [two] = [await by.encode([Media(scene_png(1), "image/png")]) for by in (encoder, coarse)]
        assert encoder.facts.images.encoder_fingerprint != coarse.facts.images.encoder_fingerprint
    assert one.digest != two.digest
    assert (one.dtype, two.dtype) == ("float32", "bfloat16")


async def test_an_embedding_of_another_dtype_is_read(encoder, plain, asked) -> None:
    question, expected = asked[0]
    async with PyTorchEncoder(config(dtype="bfloat16")) as coarse, PyTorchEngine(config()) as engine:
        prompt = await encoded_prompt(coarse, plain.token_ids(question), question.pictures)
        assert (await collect(engine.decode(prompt, GREEDY))).ids == expected


async def test_an_image_that_cannot_be_read_fails_alone(encoder) -> None:
    whole = Media(scene_png(1), "image/png")
    broken = Media(whole.content[: len(whole.content) // 2], "image/png")
    good, bad = await asyncio.gather(encoder.encode([whole]), encoder.encode([whole, broken]), return_exceptions=True)
    assert isinstance(bad, InvalidRequest)
    assert bad.violations[0].field == "media[1].data"
    assert good[0].shape == (16, 192)


async def test_images_beyond_the_queue_are_refused_with_a_time_to_come_back(encoder) -> None:
    async with PyTorchEncoder(config(max_waiting=4)) as bounded:
        first = asyncio.create_task(bounded.encode([Media(scene_png(seed), "image/png") for seed in range(4)]))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await bounded.encode([Media(scene_png(9), "image/png")])
        assert refused.value.retry_after_seconds > 0
        assert len(await first) == 4


async def test_a_cancelled_encode_leaves_nothing_behind(encoder) -> None:
    for pauses in range(10):
        task = asyncio.create_task(encoder.encode([Media(scene_png(seed), "image/png") for seed in range(8)]))
        await asyncio.sleep(pauses * 0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert encoder.load().running + encoder.load().waiting == 0
    assert len(await encoder.encode([Media(scene_png(1), "image/png")])) == 1


async def test_a_picture_is_turned_as_its_exif_says(encoder) -> None:
    from io import BytesIO

    from PIL import Image

    upright = Image.open(BytesIO(scene_png(1)))
    file, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6  # a camera turned by 90 degrees
    upright.rotate(90, expand=True).save(file, "PNG", exif=exif)
    one, two = await encoder.encode([Media(png(upright), "image/png"), Media(file.getvalue(), "image/png")])
    assert one.data == two.data


async def test_a_model_without_eyes_has_no_encode_role(tmp_path) -> None:
    from support.engines.checkpoints import save_llama

    with pytest.raises(
        ConfigError, match="'llama' have no encode role: it does not accept images; encoded are those of llava"
    ):
        async with PyTorchEncoder(config(model=save_llama(tmp_path))):
            pass


async def test_a_pull_of_an_image_prompt_takes_cached_blocks_only_of_the_same_image(encoder, plain) -> None:
    [question] = questions(1)
    ids = plain.token_ids(question)
    other = questions(2, seed=9)[1].pictures[:1]
    first, second = [await encoded_prompt(encoder, ids, pictures) for pictures in (question.pictures, other)]
    small = config(block_tokens=4)
    async with PyTorchEngine(small) as prefill, PyTorchEngine(small) as decode:
        await disaggregated(prefill, decode, first, GREEDY)
        held = await prefill.prefill(second, GREEDY)
        following = replace(without_embeddings(second), emitted=(held.first_token,))
        reservation = await decode.reserve(following, held.num_tokens)
        assert reservation.cached_blocks * 4 <= ids.index(6)
        await pull(prefill, held, decode, reservation)
        rest = await collect(decode.decode(PulledKv(following, reservation), GREEDY))
    assert (held.first_token, *rest.ids) == plain.generate(replace(question, pictures=other), GREEDY.max_tokens)
