"""The owners of an engine's blocks: every way to take blocks, and every way to free them."""

import asyncio
import mmap
from contextlib import aclosing

import pytest
from support.engines.engine_calls import MAX_WAITING, blocks_used, collect, greedy, pull
from support.eventually import PATIENCE_SECONDS, eventually

from baton.errors import InvalidRequest, Overloaded
from runtime.aio import timeout
from services.engines.answer import Tokens
from services.engines.base import Engine
from services.engines.kv import PulledKv
from services.engines.memory.device_memory import DeviceBlockMemory
from services.engines.prompt import Prompt

pytestmark = pytest.mark.usefixtures("pool")

PROMPT = Prompt(tuple(range(10, 60)))
BLOCKS_OF_PROMPT = 4
LONG = 200


def _other(index: int, length: int = 50) -> Prompt:
    return Prompt((100 + index,) * length)


async def test_held_blocks_are_counted_until_they_are_released(engine: Engine) -> None:
    held = await engine.prefill(PROMPT, greedy(2))
    assert len(held.block_ids) == BLOCKS_OF_PROMPT
    assert engine.load().blocks_held == blocks_used(engine) == BLOCKS_OF_PROMPT
    assert await held.release() == BLOCKS_OF_PROMPT
    assert engine.load().blocks_held == blocks_used(engine) == 0


async def test_releasing_twice_gives_nothing_back_the_second_time(engine: Engine) -> None:
    held = await engine.prefill(PROMPT, greedy(2))
    await held.release()
    assert await held.release() == 0


async def test_held_blocks_hold_the_prompt_without_the_first_token(engine: Engine) -> None:
    held = await engine.prefill(PROMPT, greedy(2))
    await held.release()
    assert held.num_tokens == len(PROMPT.token_ids)


async def test_a_second_prefill_finds_the_full_blocks_of_the_first(engine: Engine) -> None:
    await (await engine.prefill(PROMPT, greedy(2))).release()
    again = await engine.prefill(PROMPT, greedy(2))
    await again.release()
    assert again.cached_tokens == 48


async def test_the_last_prompt_token_is_never_taken_from_the_cache(engine: Engine) -> None:
    prompt = Prompt((3,) * 32)
    await (await engine.prefill(prompt, greedy(2))).release()
    again = await engine.prefill(prompt, greedy(2))
    await again.release()
    assert again.cached_tokens == 16


async def test_prompts_of_different_salts_share_no_block(engine: Engine) -> None:
    await (await engine.prefill(PROMPT, greedy(2))).release()
    salted = await engine.prefill(Prompt(PROMPT.token_ids, cache_salt="tenant"), greedy(2))
    await salted.release()
    assert salted.cached_tokens == 0


async def test_equal_prefixes_have_equal_hashes_on_every_worker(engine: Engine, decoder: Engine) -> None:
    here, there = await engine.prefill(PROMPT, greedy(2)), await decoder.prefill(PROMPT, greedy(2))
    await here.release()
    await there.release()
    assert here.prefix_hash == there.prefix_hash != b""


async def test_a_reservation_holds_its_blocks_until_it_is_released(engine: Engine) -> None:
    reservation = await engine.reserve(PROMPT, len(PROMPT.token_ids))
    assert len(reservation.block_ids) == blocks_used(engine) == BLOCKS_OF_PROMPT
    assert await reservation.release() == BLOCKS_OF_PROMPT
    assert await reservation.release() == 0
    assert blocks_used(engine) == 0


async def test_a_reservation_finds_what_this_worker_has_cached(engine: Engine) -> None:
    await (await engine.prefill(PROMPT, greedy(2))).release()
    reservation = await engine.reserve(PROMPT, len(PROMPT.token_ids))
    await reservation.release()
    assert reservation.cached_blocks == 3


async def test_pulled_blocks_are_in_the_cache_once_they_are_decoded_from(engine: Engine, decoder: Engine) -> None:
    held = await engine.prefill(PROMPT, greedy(3))
    following = Prompt(PROMPT.token_ids, (held.first_token,))
    reservation = await decoder.reserve(following, held.num_tokens)
    await pull(engine, held, decoder, reservation)
    await collect(decoder.decode(PulledKv(following, reservation), greedy(3)))
    again = await decoder.reserve(following, held.num_tokens)
    await again.release()
    assert again.cached_blocks == 3


async def test_blocks_that_were_reserved_and_never_confirmed_are_not_in_the_cache(engine: Engine) -> None:
    await (await engine.reserve(PROMPT, len(PROMPT.token_ids))).release()
    again = await engine.reserve(PROMPT, len(PROMPT.token_ids))
    await again.release()
    assert again.cached_blocks == 0


async def test_decode_takes_its_reservation_over(engine: Engine, decoder: Engine) -> None:
    held = await engine.prefill(PROMPT, greedy(3))
    following = Prompt(PROMPT.token_ids, (held.first_token,))
    reservation = await decoder.reserve(following, held.num_tokens)
    await pull(engine, held, decoder, reservation)
    async with aclosing(decoder.decode(PulledKv(following, reservation), greedy(30))) as stream:
        await anext(stream)
        assert await reservation.release() == 0
    assert blocks_used(decoder) == 0


async def test_a_stream_that_is_closed_before_it_was_read_gives_its_reservation_back(engine: Engine) -> None:
    prompt = Prompt(PROMPT.token_ids, (5,))
    reservation = await engine.reserve(prompt, len(PROMPT.token_ids))
    stream = engine.decode(PulledKv(prompt, reservation), greedy(9))
    await stream.aclose()
    assert blocks_used(engine) == 0


async def test_a_decode_that_raises_gives_its_reservation_back(engine: Engine) -> None:
    reservation = await engine.reserve(PROMPT, len(PROMPT.token_ids))
    with pytest.raises(InvalidRequest):
        await collect(engine.decode(PulledKv(PROMPT, reservation), greedy(9)))
    assert blocks_used(engine) == 0


async def test_closing_a_stream_returns_when_its_blocks_are_back(engine: Engine) -> None:
    stream = engine.decode(PROMPT, greedy(150))
    assert isinstance(await anext(stream), Tokens)
    assert blocks_used(engine) > 0
    await stream.aclose()
    assert blocks_used(engine) == 0


async def test_cancelling_a_reader_frees_its_blocks(engine: Engine) -> None:
    reader = asyncio.create_task(collect(engine.decode(PROMPT, greedy(150))))
    await eventually(lambda: blocks_used(engine) > 0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert blocks_used(engine) == 0


async def test_cancelling_a_prefill_at_any_point_frees_its_blocks(engine: Engine) -> None:
    cancelled = 0
    for pauses in range(12):
        task = asyncio.create_task(engine.prefill(Prompt((pauses + 5,) * LONG), greedy(2)))
        for _ in range(pauses):
            await asyncio.sleep(0)
        task.cancel()
        try:
            held = await task
        except asyncio.CancelledError:
            cancelled += 1
        else:
            # The engine's thread was quicker than so many turns of this loop.
            await held.release()
        assert blocks_used(engine) == 0
    assert cancelled


async def test_a_reservation_waits_until_there_is_room(engine: Engine) -> None:
    held = [await engine.prefill(_other(index, LONG), greedy(2)) for index in range(3)]
    waiting = asyncio.create_task(engine.reserve(_other(9, LONG), LONG))
    await eventually(lambda: engine.load().waiting == 1)
    assert not waiting.done()
    await held[0].release()
    async with timeout(PATIENCE_SECONDS):
        await (await waiting).release()
    await held[1].release()
    await held[2].release()


async def test_a_reservation_that_waits_can_be_cancelled(engine: Engine) -> None:
    held = [await engine.prefill(_other(index, LONG), greedy(2)) for index in range(3)]
    waiting = asyncio.create_task(engine.reserve(_other(9, LONG), LONG))
    await eventually(lambda: engine.load().waiting == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.load().waiting == 0
    for blocks in held:
        await blocks.release()


async def test_a_prompt_that_waits_behind_held_blocks_runs_once_they_are_back(engine: Engine) -> None:
    held = [await engine.prefill(_other(index, LONG), greedy(2)) for index in range(3)]
    waiting = asyncio.create_task(collect(engine.decode(_other(9, LONG), greedy(3))))
    await eventually(lambda: engine.load().waiting == 1)
    for blocks in held:
        await blocks.release()
    assert len((await waiting).ids) == 3


async def test_pulled_kv_runs_although_a_prompt_waits_for_its_very_blocks(engine: Engine, decoder: Engine) -> None:
    prompts = [_other(index, LONG) for index in range(4)]
    held = [await engine.prefill(prompt, greedy(9)) for prompt in prompts[:3]]
    reserved = []
    for prompt, kv in zip(prompts, held, strict=False):
        following = Prompt(prompt.token_ids, (kv.first_token,))
        reserved.append(PulledKv(following, await decoder.reserve(following, kv.num_tokens)))
        await pull(engine, kv, decoder, reserved[-1].reservation)
    waiting = asyncio.create_task(collect(decoder.decode(prompts[3], greedy(3))))
    await eventually(lambda: decoder.load().waiting == 1)
    generated = await asyncio.gather(*(collect(decoder.decode(pulled, greedy(9))) for pulled in reserved))
    assert [len(one.ids) for one in generated] == [8] * 3
    assert len((await waiting).ids) == 3
    for kv in held:
        await kv.release()


async def test_a_full_queue_refuses_the_next_request(engine: Engine) -> None:
    held = [await engine.prefill(_other(index, LONG), greedy(2)) for index in range(3)]
    waiting = [asyncio.create_task(engine.prefill(_other(10 + index, LONG), greedy(2))) for index in range(MAX_WAITING)]
    await eventually(lambda: engine.load().waiting == MAX_WAITING)
    with pytest.raises(Overloaded) as refused:
        await engine.prefill(_other(30, LONG), greedy(2))
    assert refused.value.retry_after_seconds > 0
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for blocks in held:
        await blocks.release()


async def test_more_sequences_than_blocks_still_all_finish(engine: Engine) -> None:
    prompts = [_other(index, 100) for index in range(12)]
    generated = await asyncio.gather(*(collect(engine.decode(prompt, greedy(100))) for prompt in prompts))
    assert [len(one.ids) for one in generated] == [100] * 12


async def test_a_block_reads_back_as_it_was_written(engine: Engine) -> None:
    reservation = await engine.reserve(PROMPT, len(PROMPT.token_ids))
    size = engine.memory.block_bytes
    written = bytes(index % 251 for index in range(size * BLOCKS_OF_PROMPT))
    writer, start = engine.memory.write(reservation.block_ids), 0
    for view in writer.views:
        view[:] = written[start : start + len(view)]
        start += len(view)
    writer.commit()
    assert b"".join(engine.memory.read(reservation.block_ids)) == written
    await reservation.release()


async def test_neighbouring_blocks_share_one_view(engine: Engine) -> None:
    size = engine.memory.block_bytes
    assert [len(view) for view in engine.memory.read([3, 4, 5, 9, 2])] == [3 * size, size, size]


async def test_the_file_of_the_pool_is_the_pool(engine: Engine) -> None:
    descriptor = engine.memory.file_descriptor
    if isinstance(engine.memory, DeviceBlockMemory):
        assert descriptor is None
        assert engine.memory.export().size == engine.memory.num_blocks * engine.memory.block_bytes
        return
    assert descriptor is not None
    held = await engine.prefill(PROMPT, greedy(2))
    size = engine.memory.block_bytes
    with mmap.mmap(descriptor, engine.memory.num_blocks * size, prot=mmap.PROT_READ) as mapped:
        block = held.block_ids[1]
        assert mapped[block * size : (block + 1) * size] == bytes(engine.memory.read([block])[0])
    await held.release()


async def test_the_layout_says_how_large_a_block_is(engine: Engine) -> None:
    assert engine.facts.layout.block_bytes == engine.memory.block_bytes
