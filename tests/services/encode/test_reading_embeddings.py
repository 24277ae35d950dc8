"""Embeddings in prompts: inline or pulled, confirmed, read by several workers, lost, forged."""

import asyncio
import time
from pathlib import Path

import pytest
from support.clients.image_calls import (
    BEFORE,
    HIDDEN_SIZE,
    IMAGE_TOKENS,
    PLACEHOLDER,
    decode_images,
    image,
    image_prompt,
    prefill_images,
    release_embedding,
    renew_embedding,
)
from support.clients.scraping import since
from support.clients.worker_calls import Decoded, calls_to, sampling
from support.clock import ManualClock
from support.cluster.workers import LEASE_SECONDS, Running, Starter, worker_process
from support.eventually import PATIENCE_SECONDS, eventually
from support.servers.held_handoff_service import held_back

from baton.calls import unary
from baton.engine.v1 import encode_pb2, prefill_pb2, prompt_pb2
from baton.errors import BatonError, EmbeddingLost, InvalidRequest, LayoutMismatch, Unsupported
from baton.inference.v1 import timing_pb2
from runtime.aio import timeout
from services.config import EncodeConfig

BLOCKS = -(-IMAGE_TOKENS // 16)


async def answer(prefill: Running, decode: Running, prompt: prompt_pb2.Prompt, request_id: str = "r") -> list[int]:
    """Returns all ids: prefilled on one worker, decoded on the other, which gets no embeddings."""
    handoff = await prefill_images(prefill.calls, prompt, request_id)
    bare = prompt_pb2.Prompt()
    bare.CopyFrom(prompt)
    for span in bare.media:
        span.ClearField("embedding")
    decoded = await decode_images(decode.calls, bare, handoff, request_id=request_id)
    return [handoff.first_token.token_id, *decoded.token_ids]


async def test_inline_and_leased_embeddings_give_one_answer(
    inline: Running, encode: Running, prefill: Running, decode: Running
) -> None:
    [sent], [leased] = await inline.calls.encode(image()), await encode.calls.encode(image())
    assert await answer(prefill, decode, image_prompt(sent)) == await answer(prefill, decode, image_prompt(leased))


async def test_the_answer_depends_on_the_image_and_on_the_order_of_images(
    inline: Running, prefill: Running, decode: Running
) -> None:
    one, other = await inline.calls.encode(image(32), image(33))
    prompts = [image_prompt(one), image_prompt(other), image_prompt(one, other), image_prompt(other, one)]
    answers = [tuple(await answer(prefill, decode, prompt)) for prompt in prompts]
    assert len(set(answers)) == 4


async def test_a_whole_decode_answers_like_prefill_and_decode_apart(
    encode: Running, prefill: Running, decode: Running
) -> None:
    [embedding] = await encode.calls.encode(image())
    apart = await answer(prefill, decode, image_prompt(embedding))
    assert (await decode_images(decode.calls, image_prompt(embedding), request_id="w")).token_ids == apart


async def test_a_lost_decode_continues_with_the_embeddings(encode: Running, decode: Running) -> None:
    [embedding] = await encode.calls.encode(image())
    whole = await decode_images(decode.calls, image_prompt(embedding))
    rest = await decode_images(decode.calls, image_prompt(embedding), emitted=whole.token_ids[:5])
    assert rest.token_ids == whole.token_ids[5:]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_processes_read_embeddings_by_every_transport(
    inline: Running, prefill: Running, decode: Running, tmp_path: Path, transport: str
) -> None:
    with encode_process(tmp_path, f"transports=[{transport}]") as owner:
        async with calls_to(owner.address) as calls:
            [leased] = await calls.encode(image())
            [sent] = await inline.calls.encode(image())
            assert leased.WhichOneof("source") == "lease"
            pulled = await answer(prefill, decode, image_prompt(leased))
            assert pulled == await answer(prefill, decode, image_prompt(sent))
            assert (await release_embedding(calls, leased)).still_valid


async def test_an_embedding_is_read_by_several_and_is_held_until_it_is_released(
    encode: Running, prefill: Running, decode: Running
) -> None:
    [embedding] = await encode.calls.encode(image())
    handoffs = await asyncio.gather(
        *(prefill_images(prefill.calls, image_prompt(embedding), f"r{index}") for index in range(5))
    )
    assert len({handoff.first_token.token_id for handoff in handoffs}) == 1
    assert encode.blocks_held == BLOCKS
    assert (await release_embedding(encode.calls, embedding)).still_valid
    assert encode.blocks_used == 0


async def test_what_is_pulled_is_counted_by_its_transport(encode: Running, prefill: Running) -> None:
    moved = since("baton_embedding_pull_bytes_total", transport="shm")
    pulls = since("baton_embedding_pull_seconds_count", transport="shm")
    [embedding] = await encode.calls.encode(image())
    await prefill_images(prefill.calls, image_prompt(embedding))
    assert (moved.grown, pulls.grown) == (embedding.lease.num_bytes, 1)


async def test_embeddings_of_several_images_are_pulled_at_the_same_time(encode: Running, prefill: Running) -> None:
    one, other = await encode.calls.encode(image(32), image(33))
    async with held_back(encode.calls, "Renew") as first, held_back(encode.calls, "Renew") as second:
        one.lease.address, other.lease.address = first.address, second.address
        pulling = asyncio.create_task(prefill_images(prefill.calls, image_prompt(one, other)))
        async with timeout(PATIENCE_SECONDS):
            await first.asked.wait()
            await second.asked.wait()
        first.let_go.set()
        second.let_go.set()
        assert (await pulling).first_token.token_id


async def test_the_first_lost_embedding_cancels_the_other_pulls(encode: Running, prefill: Running) -> None:
    one, other = await encode.calls.encode(image(32), image(33))
    await release_embedding(encode.calls, other)
    async with held_back(encode.calls, "Renew") as owner:
        one.lease.address = owner.address
        with pytest.raises(EmbeddingLost):
            await prefill_images(prefill.calls, image_prompt(one, other))
        assert not owner.let_go.is_set()
    assert (await release_embedding(encode.calls, one)).still_valid


async def test_pulls_that_run_at_the_same_time_are_one_stage_of_the_timings(encode: Running, prefill: Running) -> None:
    one, other = await encode.calls.encode(image(32), image(33))
    async with held_back(encode.calls, "Renew") as owner:
        one.lease.address = other.lease.address = owner.address
        request = prefill_pb2.PrefillRequest(request_id="r", prompt=image_prompt(one, other), sampling=sampling())
        started = time.perf_counter()
        running = asyncio.ensure_future(unary(prefill.calls.prefills.Prefill(request, timeout=PATIENCE_SECONDS)))
        await eventually(owner.asked.is_set)
        await asyncio.sleep(0.3)
        owner.let_go.set()
        timings = (await running).timings
    (pulls,) = [each for each in timings if each.stage == timing_pb2.STAGE_EMBEDDING_TRANSFER]
    assert (pulls.num_bytes, pulls.transport) == (one.lease.num_bytes + other.lease.num_bytes, "shm")
    assert pulls.duration.ToNanoseconds() > 0.2e9
    assert sum(each.duration.ToNanoseconds() for each in timings) < (time.perf_counter() - started) * 1e9


async def test_reading_renews_the_lease(start: Starter, prefill: Running) -> None:
    clock = ManualClock()
    images = {"image_tokens": IMAGE_TOKENS, "image_hidden_size": HIDDEN_SIZE}
    async with start("encode", encode=EncodeConfig(inline_bytes=0), clock=clock, **images) as encode:
        [embedding] = await encode.calls.encode(image())
        for index in range(4):
            clock.advance(LEASE_SECONDS * 0.9)
            await prefill_images(prefill.calls, image_prompt(embedding), f"r{index}")
        assert await renew_embedding(encode.calls, embedding)
        await release_embedding(encode.calls, embedding)


async def test_another_image_never_hits_the_cache_and_the_same_one_does(inline: Running, decode: Running) -> None:
    one, other = await inline.calls.encode(image(32), image(33))
    first, second, again = [
        await decode_images(decode.calls, image_prompt(embedding)) for embedding in (one, other, one)
    ]
    assert [cached(decoded) for decoded in (first, second)] == [0, 0]
    assert cached(again) >= IMAGE_TOKENS
    assert again.token_ids == first.token_ids


async def test_a_released_embedding_is_lost_to_later_readers(encode: Running, prefill: Running) -> None:
    [embedding] = await encode.calls.encode(image())
    await release_embedding(encode.calls, embedding)
    with pytest.raises(EmbeddingLost) as lost:
        await prefill_images(prefill.calls, image_prompt(embedding))
    assert lost.value.stage == "prefill"
    assert prefill.blocks_used == 0


async def test_blocks_that_were_freed_and_reused_are_never_read_as_another_image(
    encode: Running, prefill: Running
) -> None:
    [embedding] = await encode.calls.encode(image(32))
    await release_embedding(encode.calls, embedding)
    [other] = await encode.calls.encode(image(33), request_id="other")
    assert list(other.lease.block_ids) == list(embedding.lease.block_ids)
    with pytest.raises(EmbeddingLost):
        await prefill_images(prefill.calls, image_prompt(embedding))


async def test_an_expired_embedding_is_lost(encode: Running, decode: Running) -> None:
    [embedding] = await encode.calls.encode(image())
    encode.let_a_lease_pass()
    await eventually(lambda: encode.blocks_used == 0)
    with pytest.raises(EmbeddingLost):
        await decode_images(decode.calls, image_prompt(embedding))


async def test_an_embedding_of_an_earlier_epoch_is_lost(encode: Running, prefill: Running) -> None:
    [embedding] = await encode.calls.encode(image())
    embedding.lease.epoch -= 1
    with pytest.raises(EmbeddingLost):
        await prefill_images(prefill.calls, image_prompt(embedding))


async def test_an_owner_that_was_killed_loses_its_embeddings_also_where_its_pool_is_mapped(
    prefill: Running, tmp_path: Path
) -> None:
    with encode_process(tmp_path) as owner:
        async with calls_to(owner.address) as calls:
            one, other = await calls.encode(image(32), image(33))
            await prefill_images(prefill.calls, image_prompt(one), "mapped")
            owner.kill()
            with pytest.raises(EmbeddingLost):
                await prefill_images(prefill.calls, image_prompt(other))
    await eventually(lambda: prefill.blocks_used == 0)


async def test_an_owner_that_freezes_is_given_up_within_its_lease(prefill: Running, tmp_path: Path) -> None:
    with encode_process(tmp_path) as owner:
        async with calls_to(owner.address) as calls:
            [embedding] = await calls.encode(image())
            owner.pause()
            started = time.monotonic()
            with pytest.raises(EmbeddingLost):
                await prefill_images(prefill.calls, image_prompt(embedding))
            assert time.monotonic() - started < 10 * LEASE_SECONDS
    assert prefill.blocks_used == 0


@pytest.mark.parametrize("seen", ["GetPool", "Renew"])
async def test_a_pull_that_is_cancelled_leaves_nothing(encode: Running, prefill: Running, seen: str) -> None:
    [embedding] = await encode.calls.encode(image())
    async with held_back(encode.calls, seen) as owner:
        embedding.lease.address = owner.address
        task = asyncio.create_task(prefill_images(prefill.calls, image_prompt(embedding)))
        await owner.asked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: prefill.blocks_used == prefill.worker.engines.load().running == 0)


async def test_an_embedding_of_another_model_is_refused(start: Starter, encode: Running) -> None:
    [embedding] = await encode.calls.encode(image())
    async with start("prefill", name="other", image_tokens=IMAGE_TOKENS, image_hidden_size=HIDDEN_SIZE) as other:
        with pytest.raises(LayoutMismatch):
            await prefill_images(other.calls, image_prompt(embedding))


async def test_a_model_without_images_refuses_media(start: Starter, inline: Running) -> None:
    [embedding] = await inline.calls.encode(image())
    async with start("decode") as text_only:
        with pytest.raises(Unsupported, match="text only"):
            await decode_images(text_only.calls, image_prompt(embedding))


async def test_a_placeholder_without_a_medium_is_refused(prefill: Running) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt\.token_ids"):
        await prefill_images(prefill.calls, prompt_pb2.Prompt(token_ids=[1, PLACEHOLDER, 2]))


async def test_a_missing_embedding_is_named(inline: Running, prefill: Running, decode: Running) -> None:
    [embedding] = await inline.calls.encode(image())
    for run in (
        prefill_images(prefill.calls, image_prompt(embedding, without=True)),
        decode_images(decode.calls, image_prompt(embedding, without=True)),
    ):
        with pytest.raises(InvalidRequest, match=r"prompt.media\[0\].embedding: "):
            await run


FORGED = {
    "shape of another length": ("embedding.shape", lambda span: span.embedding.shape.__setitem__(0, 39)),
    "shape of another width": ("embedding.shape", lambda span: span.embedding.shape.__setitem__(1, 9)),
    "shape of three": ("embedding.shape", lambda span: span.embedding.shape.append(1)),
    "dtype": ("embedding.dtype", lambda span: setattr(span.embedding, "dtype", "int8")),
    "another dtype": ("embedding.inline", lambda span: setattr(span.embedding, "dtype", "bfloat16")),
    "bytes": ("embedding.inline", lambda span: setattr(span.embedding, "inline", b"x" * 5)),
    "digest": ("embedding.digest", lambda span: setattr(span.embedding, "digest", b"x")),
    "no digest": ("digest", lambda span: (span.ClearField("digest"), span.embedding.ClearField("digest"))),
    "no source": ("embedding.source", lambda span: span.embedding.ClearField("inline")),
    "no tokens": ("num_tokens", lambda span: setattr(span, "num_tokens", 0)),
    "beyond the prompt": ("num_tokens", lambda span: setattr(span, "start", 10_000)),
    "not on placeholders": ("start", lambda span: setattr(span, "start", 0)),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
async def test_a_forged_span_is_refused_by_its_field(inline: Running, prefill: Running, what: str) -> None:
    field, forge = FORGED[what]
    prompt = image_prompt(*await inline.calls.encode(image()))
    forge(prompt.media[0])
    with pytest.raises(InvalidRequest) as refused:
        await prefill_images(prefill.calls, prompt)
    assert f"prompt.media[0].{field}" in [violation.field for violation in refused.value.violations]
    assert prefill.blocks_used == 0


async def test_overlapping_spans_are_refused(inline: Running, prefill: Running) -> None:
    prompt = image_prompt(*await inline.calls.encode(image(32), image(33)))
    prompt.media[1].start = prompt.media[0].start + 1
    with pytest.raises(InvalidRequest, match=r"prompt.media\[1\].start"):
        await prefill_images(prefill.calls, prompt)


FORGED_LEASES = {
    "no id": ("handoff_id", lambda lease: lease.ClearField("handoff_id")),
    "no address": ("address", lambda lease: lease.ClearField("address")),
    "bytes": ("num_bytes", lambda lease: setattr(lease, "num_bytes", 7)),
    "too few blocks": ("block_ids", lambda lease: lease.block_ids.pop()),
    "a block that is none": ("block_ids[0]", lambda lease: lease.block_ids.__setitem__(0, 10**6)),
    "a block twice": ("block_ids[1]", lambda lease: lease.block_ids.__setitem__(1, lease.block_ids[0])),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED_LEASES)
async def test_a_forged_lease_is_refused_by_its_field(encode: Running, prefill: Running, what: str) -> None:
    field, forge = FORGED_LEASES[what]
    [embedding] = await encode.calls.encode(image())
    lease = encode_pb2.EmbeddingLease()
    lease.CopyFrom(embedding.lease)
    forge(embedding.lease)
    with pytest.raises(InvalidRequest) as refused:
        await prefill_images(prefill.calls, image_prompt(embedding))
    assert f"prompt.media[0].embedding.lease.{field}" in [violation.field for violation in refused.value.violations]
    embedding.lease.CopyFrom(lease)
    assert (await release_embedding(encode.calls, embedding)).still_valid


async def test_blocks_of_another_image_do_not_become_this_one(encode: Running, prefill: Running) -> None:
    one, other = await encode.calls.encode(image(32), image(33))
    one.lease.block_ids[:] = other.lease.block_ids
    with pytest.raises(BatonError, match="does not belong to its digest"):
        await prefill_images(prefill.calls, image_prompt(one))


async def test_imported_image_prompts_without_room_wait_for_one_another(
    start: Starter, inline: Running, prefill: Running
) -> None:
    embeddings = await inline.calls.encode(*(image(32 + index) for index in range(3)))
    blocks = -(-(len(BEFORE) + IMAGE_TOKENS + 40) // 16)
    async with start("decode", num_blocks=3 * blocks - 1, image_tokens=40, image_hidden_size=8) as tight:
        handoffs = [await prefill_images(prefill.calls, image_prompt(one), f"p{i}") for i, one in enumerate(embeddings)]
        prompts = [image_prompt(one, without=True) for one in embeddings]
        ended = await asyncio.gather(
            *(
                decode_images(tight.calls, prompt, handoff, request_id=f"d{i}")
                for i, (prompt, handoff) in enumerate(zip(prompts, handoffs, strict=True))
            ),
            return_exceptions=True,
        )
        assert all(isinstance(one, Decoded) and len(one.token_ids) == 19 for one in ended)
        assert tight.blocks_used == 0


def cached(decoded: Decoded) -> int:
    assert decoded.finished is not None
    return decoded.finished.usage.cached_tokens


def encode_process(folder: Path, *overrides: str):
    engine = f"engine={{kind: simulated, image_tokens: {IMAGE_TOKENS}, image_hidden_size: {HIDDEN_SIZE}}}"
    return worker_process("encode", folder, engine, "encode.inline_bytes=0", *overrides)
