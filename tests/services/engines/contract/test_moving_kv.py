"""The contract of engines that transfer KV themselves; test_blocks.py has that of engines with a pool."""

import asyncio
from contextlib import aclosing, suppress

import pytest
from support.engines.engine_calls import MAX_SEQUENCES, MAX_WAITING, blocks_used, collect, fetch, greedy
from support.eventually import eventually

from baton.errors import HandoffLost, InvalidRequest, LayoutMismatch, Overloaded, Unsupported
from services.engines.base import Engine
from services.engines.kv_transfer import EngineHeldKv, RemoteKv, TransfersKv
from services.engines.prompt import Prompt

pytestmark = pytest.mark.usefixtures("moving")

PROMPT = Prompt(tuple(range(10, 60)))


async def _prefill(engine: Engine, max_tokens: int = 9) -> EngineHeldKv:
    held = await engine.prefill(PROMPT, greedy(max_tokens))
    assert isinstance(held, EngineHeldKv)
    return held


def _following(held: EngineHeldKv) -> Prompt:
    return Prompt(PROMPT.token_ids, (held.first_token,))


def _moves(engine: Engine) -> TransfersKv:
    assert engine.kv_transfer is not None
    return engine.kv_transfer


async def test_held_kv_is_counted_until_it_is_fetched(engine: Engine, decoder: Engine, blocks_of_prompt: int) -> None:
    held = await _prefill(engine)
    assert engine.load().blocks_held == blocks_used(engine) == blocks_of_prompt
    async with aclosing(await fetch(held, _moves(decoder), _following(held), greedy(9))):
        assert engine.load().blocks_held == 0


@pytest.mark.usefixtures("freed_by_engine")
async def test_held_kv_that_no_worker_fetches_is_counted_until_the_engine_frees_it(
    engine: Engine, blocks_of_prompt: int
) -> None:
    held = await _prefill(engine)
    assert await held.release() == 0
    assert engine.load().blocks_held == blocks_of_prompt
    await eventually(lambda: engine.load().blocks_held == 0)


async def test_held_kv_has_no_blocks_and_a_state(engine: Engine) -> None:
    held = await _prefill(engine)
    assert held.block_ids == ()
    assert held.engine_state
    assert held.num_tokens == len(PROMPT.token_ids)


async def test_the_first_token_is_not_yielded_again(engine: Engine, decoder: Engine) -> None:
    held = await _prefill(engine)
    rest = await collect(await fetch(held, _moves(decoder), _following(held), greedy(9)))
    assert len(rest.ids) == 8


@pytest.mark.usefixtures("freed_by_engine")
async def test_kv_is_fetched_once(engine: Engine, decoder: Engine) -> None:
    held = await _prefill(engine)
    await collect(await fetch(held, _moves(decoder), _following(held), greedy(9)))
    with pytest.raises(HandoffLost):
        await _moves(decoder).decode_remote(RemoteKv(_following(held), held.num_tokens, held.engine_state), greedy(9))


@pytest.mark.usefixtures("freed_by_engine")
async def test_more_than_the_first_token_is_refused(engine: Engine, decoder: Engine) -> None:
    held = await _prefill(engine)
    further = Prompt(PROMPT.token_ids, (held.first_token, 7))
    with pytest.raises(HandoffLost, match="more than the first token"):
        await _moves(decoder).decode_remote(RemoteKv(further, held.num_tokens, held.engine_state), greedy(9))


@pytest.mark.parametrize("state", [b"", b"\x00\x01\x02", b"{}"])
async def test_a_state_that_is_none_never_reaches_the_engine(engine: Engine, state: bytes) -> None:
    with pytest.raises((InvalidRequest, LayoutMismatch)):
        await _moves(engine).decode_remote(RemoteKv(Prompt((5, 6), (7,)), 2, state), greedy(9))
    assert engine.load().running == 0


async def test_a_taker_that_is_cancelled_leaves_nothing(engine: Engine, decoder: Engine) -> None:
    held = await _prefill(engine)
    taking = asyncio.create_task(
        _moves(decoder).decode_remote(RemoteKv(_following(held), held.num_tokens, held.engine_state), greedy(150))
    )
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await eventually(lambda: decoder.load().running == 0)


async def test_a_stream_that_is_closed_before_it_was_read_leaves_nothing(engine: Engine, decoder: Engine) -> None:
    held = await _prefill(engine, 150)
    stream = await fetch(held, _moves(decoder), _following(held), greedy(150))
    await stream.aclose()
    assert decoder.load().running == blocks_used(decoder) == 0


async def test_closing_a_stream_returns_when_the_engine_has_ended_it(engine: Engine) -> None:
    stream = engine.decode(PROMPT, greedy(150))
    await anext(stream)
    assert blocks_used(engine) > 0
    await stream.aclose()
    assert engine.load().running == blocks_used(engine) == 0


async def test_cancelling_a_prefill_at_any_point_leaves_nothing_in_the_end(engine: Engine) -> None:
    for pauses in range(12):
        task = asyncio.create_task(engine.prefill(Prompt((pauses + 5,) * 200), greedy(2)))
        for _ in range(pauses):
            await asyncio.sleep(0)
        task.cancel()
        # On a busy machine it may have ended already.
        with suppress(asyncio.CancelledError):
            await (await task).release()
    await eventually(lambda: blocks_used(engine) == 0)


async def test_one_request_too_many_is_refused(engine: Engine) -> None:
    streams = [engine.decode(Prompt((5 + index,)), greedy(200)) for index in range(MAX_SEQUENCES + MAX_WAITING)]
    first = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await eventually(lambda: engine.load().running + engine.load().waiting == len(streams))
    with pytest.raises(Overloaded):
        await engine.prefill(PROMPT, greedy(2))
    await asyncio.gather(*first)
    for stream in streams:
        await stream.aclose()


async def test_there_is_no_pool_to_pull_into(engine: Engine) -> None:
    assert engine.memory is None
    with pytest.raises(Unsupported):
        await engine.reserve(PROMPT, 50)
