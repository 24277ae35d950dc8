"""The contract of engines whose running decodes move: they yield anywhere, lend what is final, and lose nothing."""

import asyncio
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest
from support.engines.engine_calls import BLOCK_TOKENS, collect, greedy, pull
from support.eventually import PATIENCE_SECONDS, eventually
from support.sampled import sampled

from baton.errors import Unsupported
from runtime.aio import timeout
from services.engines.answer import Finished, FinishReason
from services.engines.base import Engine
from services.engines.kv import HeldKv, PulledKv
from services.engines.prompt import Prompt, Sampling
from services.engines.running.generation import Generation

PROMPT = Prompt(tuple(range(10, 45)))
SAMPLINGS = {
    "greedy": greedy(30),
    "seeded": Sampling(30, temperature=0.9, seed=3, ignore_eos=True),
    "penalties": Sampling(30, temperature=0.8, seed=4, ignore_eos=True, frequency_penalty=0.7, presence_penalty=0.2),
    "logprobs": Sampling(30, temperature=0.0, ignore_eos=True, logprobs=2),
}


@pytest.fixture(autouse=True)
def moves(engine: Engine, request: pytest.FixtureRequest) -> None:
    is_for_others = request.node.function is test_other_engines_refuse
    if engine.moves_decodes is is_for_others:
        pytest.skip("for engines that move running decodes, and one test for those that do not")


async def _read(generation: Generation, ids: list[int], until: int) -> Finished | None:
    """Reads on until there are so many ids, or to the end."""
    async with timeout(PATIENCE_SECONDS):
        while len(ids) < until:
            event = await anext(generation)
            if isinstance(event, Finished):
                return event
            ids += event.ids
    return None


async def _yielded(engine: Engine, prompt: Prompt, sampling: Sampling, after: int) -> tuple[list[int], HeldKv | None]:
    ids: list[int] = []
    generation = engine.generation(prompt, sampling)
    async with aclosing(generation):
        end = await _read(generation, ids, after)
        if end is None:
            await generation.yield_next()
            await generation.yield_next()
            end = await _read(generation, ids, 10**6)
        assert end is not None
        if end.reason is not FinishReason.YIELDED:
            return ids, None
        assert end.prompt_tokens == len(prompt.token_ids)
        return ids, generation.pop_held()


async def _go_on(held: HeldKv, source: Engine, target: Engine, prompt: Prompt, sampling: Sampling) -> tuple[int, ...]:
    reservation = await target.reserve(prompt, held.num_tokens)
    await pull(source, held, target, reservation)
    return (await collect(target.decode(PulledKv(prompt, reservation), sampling))).ids


# Penalties have a seed, and log probabilities are greedy.
@pytest.mark.parametrize("name", sampled(SAMPLINGS, ["penalties", "logprobs"]))
async def test_a_decode_that_yields_anywhere_goes_on_with_the_same_ids(
    engine: Engine, decoder: Engine, name: str
) -> None:
    sampling = SAMPLINGS[name]
    expected = (await collect(decoder.decode(PROMPT, sampling))).ids
    moved = 0
    for after in range(1, sampling.max_tokens + 1):
        prompt = replace(PROMPT, cache_salt=f"{name}{after}")
        company = asyncio.ensure_future(collect(engine.decode(replace(PROMPT, cache_salt="company"), greedy(20))))
        ids, held = await _yielded(engine, prompt, sampling, after)
        if held is not None:
            moved += 1
            assert held.num_tokens == len(prompt.token_ids) + len(ids) - 1
            assert held.first_token == ids[-1]
            assert len(held.block_ids) == -(-held.num_tokens // BLOCK_TOKENS)
            ids += await _go_on(held, engine, decoder, replace(prompt, emitted=tuple(ids)), sampling)
        await company
        assert tuple(ids) == expected
    assert moved > 20


async def test_an_engine_takes_its_own_decode_back(engine: Engine) -> None:
    expected = (await collect(engine.decode(PROMPT, greedy(30)))).ids
    ids, held = await _yielded(engine, replace(PROMPT, cache_salt="own"), greedy(30), 9)
    assert held is not None
    prompt = replace(PROMPT, cache_salt="own", emitted=tuple(ids))
    ids += await _go_on(held, engine, engine, prompt, greedy(30))
    assert tuple(ids) == expected


async def test_held_blocks_of_a_decode_that_is_closed_are_free(engine: Engine) -> None:
    ids: list[int] = []
    async with aclosing(engine.generation(PROMPT, greedy(60))) as generation:
        await _read(generation, ids, 3)
        await generation.yield_next()
        assert await _read(generation, ids, 100) is not None
        assert engine.load().blocks_used
    await eventually(lambda: engine.load().blocks_used == 0)


async def test_a_decode_that_waits_for_blocks_yields_without_any(engine: Engine) -> None:
    held = [await engine.prefill(Prompt((n + 1,) * 230), greedy(9)) for n in range(2)]
    ids: list[int] = []
    async with aclosing(engine.generation(Prompt((7,) * 200), greedy(5))) as waiting:
        reading = asyncio.ensure_future(_read(waiting, ids, 100))
        await eventually(lambda: engine.load().waiting == 1)
        await waiting.yield_next()
        end = await reading
        assert end is not None
        assert (end.reason, ids, waiting.pop_held()) == (FinishReason.YIELDED, [], None)
    for one in held:
        await one.release()


async def test_lent_blocks_are_final_and_stay_when_their_decode_has_ended(engine: Engine, decoder: Engine) -> None:
    expected = (await collect(decoder.decode(PROMPT, greedy(60)))).ids
    prompt, ids = replace(PROMPT, cache_salt="lent"), []
    async with aclosing(engine.generation(prompt, greedy(60))) as generation:
        await _read(generation, ids, 40)
        lent = await generation.lend(len(prompt.token_ids) + len(ids))
        assert lent is not None
        assert lent.num_tokens % BLOCK_TOKENS == 0
        assert lent.num_tokens >= 3 * BLOCK_TOKENS
        context = (*prompt.token_ids, *ids)
        assert lent.next_token == context[lent.num_tokens]
    begun = Prompt(context[: lent.num_tokens], (lent.next_token,), cache_salt="lent")
    reservation = await decoder.reserve(begun, lent.num_tokens)
    await pull(engine, lent, decoder, reservation)
    await reservation.cache(len(reservation.block_ids))
    await eventually(lambda: engine.load().blocks_used == decoder.load().blocks_used == 0)
    again = await collect(decoder.decode(replace(prompt, emitted=tuple(ids)), greedy(60)))
    assert (*ids, *again.ids) == expected
    assert again.finished.cached_tokens >= len(PROMPT.token_ids) // BLOCK_TOKENS * BLOCK_TOKENS


async def test_nothing_is_lent_of_a_decode_without_a_full_block(engine: Engine) -> None:
    async with aclosing(engine.generation(Prompt((5, 6, 7)), greedy(8))) as generation:
        await _read(generation, [], 1)
        assert await generation.lend(4) is None


async def test_a_loan_that_is_given_up_while_it_is_made_holds_nothing(engine: Engine) -> None:
    async with aclosing(engine.generation(PROMPT, greedy(60))) as generation:
        await _read(generation, [], 3)
        lending = asyncio.ensure_future(generation.lend(38))
        await asyncio.sleep(0)
        lending.cancel()
        with suppress(asyncio.CancelledError):
            lent = await lending
            assert lent is not None
            await lent.release()
    await eventually(lambda: engine.load().blocks_used == 0)


async def test_other_engines_refuse(engine: Engine) -> None:
    async with aclosing(engine.generation(PROMPT, greedy(9))) as generation:
        with pytest.raises(Unsupported):
            await generation.yield_next()
        with pytest.raises(Unsupported):
            await generation.lend(40)
        assert generation.pop_held() is None
