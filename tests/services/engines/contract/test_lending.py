"""The contract of engines that lend their prefix caches: what is lent stays as it is, and is given back."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from support.engines.engine_calls import BLOCK_TOKENS, CONTEXT_TOKENS, collect, greedy
from support.eventually import eventually

from engine_protocol.prefix_hash import block_hashes
from services.engines.base import Engine
from services.engines.kv import HeldBlocks, Reservation
from services.engines.prompt import Prompt

PROMPT = Prompt(tuple(range(10, 10 + 3 * BLOCK_TOKENS + 5)))
NAMES = block_hashes(PROMPT.token_ids, BLOCK_TOKENS)


@pytest.fixture(autouse=True)
def lends(engine: Engine) -> None:
    if engine.prefixes is None:
        pytest.skip("for engines that lend their prefix caches")


async def _lend(engine: Engine, names: list[bytes] = NAMES) -> HeldBlocks | None:
    assert engine.prefixes is not None
    return await engine.prefixes.lend_prefix(names, 0)


def _copy(engine: Engine, lent: HeldBlocks, decoder: Engine, reservation: Reservation) -> None:
    """Fills the first blocks of a reservation with those that are lent."""
    assert engine.memory is not None
    assert decoder.memory is not None
    arriving = b"".join(engine.memory.read(lent.block_ids))
    writer = decoder.memory.write(reservation.block_ids[: len(lent.block_ids)])
    start = 0
    for view in writer.views:
        view[:] = arriving[start : start + len(view)]
        start += len(view)
    writer.commit()


async def test_what_is_lent_and_cached_elsewhere_gives_the_same_ids(engine: Engine, decoder: Engine) -> None:
    expected = (await collect(engine.decode(PROMPT, greedy(20)))).ids
    lent = await _lend(engine)
    assert lent is not None
    assert (len(lent.block_ids), lent.num_tokens) == (3, 3 * BLOCK_TOKENS)
    reservation = await decoder.reserve(PROMPT, lent.num_tokens)
    assert list(reservation.block_hashes) == NAMES
    _copy(engine, lent, decoder, reservation)
    assert decoder.digest(reservation.block_ids) == engine.digest(lent.block_ids)
    await reservation.cache(3)
    assert await lent.release() == 3
    await eventually(lambda: engine.load().blocks_used == decoder.load().blocks_used == 0)
    borrowed = await collect(decoder.decode(PROMPT, greedy(20)))
    assert borrowed.ids == expected
    assert borrowed.finished.cached_tokens == 3 * BLOCK_TOKENS


async def test_lent_blocks_are_counted_as_held_each_once(engine: Engine) -> None:
    await collect(engine.decode(PROMPT, greedy(2)))
    lent, again = await _lend(engine), await _lend(engine, NAMES[:2])
    assert lent is not None
    assert again is not None
    assert engine.load().blocks_held == engine.load().blocks_used == 3
    await lent.release()
    assert engine.load().blocks_held == engine.load().blocks_used == 2
    await again.release()
    assert engine.load().blocks_held == 0


async def test_of_a_reservation_only_what_has_its_kv_is_cached(engine: Engine, decoder: Engine) -> None:
    expected = (await collect(engine.decode(PROMPT, greedy(9)))).ids
    lent = await _lend(engine, NAMES[:2])
    assert lent is not None
    reservation = await decoder.reserve(PROMPT, 3 * BLOCK_TOKENS)
    _copy(engine, lent, decoder, reservation)
    await reservation.cache(2)
    await lent.release()
    borrowed = await collect(decoder.decode(PROMPT, greedy(9)))
    assert borrowed.ids == expected
    assert borrowed.finished.cached_tokens == 2 * BLOCK_TOKENS


async def test_nothing_is_lent_that_is_not_cached(engine: Engine) -> None:
    await collect(engine.decode(PROMPT, greedy(2)))
    salted = block_hashes(PROMPT.token_ids, BLOCK_TOKENS, "a salt")
    assert await _lend(engine, salted) is None
    assert await _lend(engine, [salted[0], *NAMES]) is None
    some = await _lend(engine, [NAMES[0], salted[1], NAMES[2]])
    assert some is not None
    assert len(some.block_ids) == 1
    await some.release()
    assert engine.load().blocks_used == 0


async def test_lent_blocks_survive_whatever_is_computed_meanwhile(engine: Engine) -> None:
    await collect(engine.decode(PROMPT, greedy(2)))
    lent = await _lend(engine)
    assert lent is not None
    before = engine.digest(lent.block_ids)
    for number in range(4):
        other = Prompt((number + 3,) * (CONTEXT_TOKENS - 20))
        await collect(engine.decode(replace(other, cache_salt=str(number)), greedy(2)))
    assert engine.digest(lent.block_ids) == before
    assert (await lent.release(), await lent.release()) == (3, 0)
    await eventually(lambda: engine.load().blocks_used == 0)


async def test_a_loan_that_is_given_up_while_it_is_made_holds_nothing(engine: Engine) -> None:
    await collect(engine.decode(PROMPT, greedy(2)))
    lending = asyncio.ensure_future(_lend(engine))
    await asyncio.sleep(0)
    lending.cancel()
    with suppress(asyncio.CancelledError):
        lent = await lending
        assert lent is not None
        await lent.release()
    await eventually(lambda: engine.load().blocks_used == 0)
