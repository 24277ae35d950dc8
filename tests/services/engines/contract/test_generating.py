"""The output of every engine, and its end."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from support.engines.engine_calls import collect, disaggregated, greedy
from support.eventually import eventually

from baton.errors import InvalidRequest
from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.base import Engine
from services.engines.prompt import Prompt, Sampling

PROMPT = Prompt(tuple(range(10, 60)))
SAMPLED = Sampling(max_tokens=12, temperature=0.8, seed=7, ignore_eos=True)


async def test_a_generation_yields_max_tokens_ids_and_then_its_end(engine: Engine) -> None:
    generated = await collect(engine.decode(PROMPT, greedy(9)))
    assert len(generated.ids) == 9
    assert generated.finished.reason is FinishReason.LENGTH


async def test_the_end_tells_how_long_the_prompt_was(engine: Engine) -> None:
    generated = await collect(engine.decode(PROMPT, greedy(2)))
    assert generated.finished.prompt_tokens == len(PROMPT.token_ids)


@pytest.mark.usefixtures("prefilling")
async def test_the_first_token_of_prefill_is_the_first_token_of_decode(engine: Engine) -> None:
    generated = await collect(engine.decode(PROMPT, greedy(1)))
    held = await engine.prefill(PROMPT, greedy(2))
    await held.release()
    assert (held.first_token,) == generated.ids


async def test_decoding_elsewhere_continues_what_prefill_began(engine: Engine, decoder: Engine) -> None:
    whole = await collect(engine.decode(PROMPT, greedy(12)))
    rest = await disaggregated(engine, decoder, PROMPT, greedy(12))
    assert rest == whole.ids[1:]


async def test_sampling_elsewhere_continues_what_prefill_began(engine: Engine, decoder: Engine) -> None:
    whole = await collect(engine.decode(PROMPT, SAMPLED))
    rest = await disaggregated(engine, decoder, PROMPT, SAMPLED)
    assert rest == whole.ids[1:]


@pytest.mark.usefixtures("pool")
async def test_decoding_from_pulled_blocks_may_begin_behind_several_emitted_tokens(
    engine: Engine, decoder: Engine
) -> None:
    whole = await collect(engine.decode(PROMPT, greedy(40)))
    rest = await disaggregated(engine, decoder, PROMPT, greedy(40), more=whole.ids[1:25])
    assert rest == whole.ids[25:]


async def test_emitted_tokens_are_continued_and_not_yielded_again(engine: Engine) -> None:
    whole = await collect(engine.decode(PROMPT, greedy(10)))
    rest = await collect(engine.decode(replace(PROMPT, emitted=whole.ids[:4]), greedy(10)))
    assert rest.ids == whole.ids[4:]


@pytest.mark.usefixtures("seeded")
async def test_sampling_continues_alike_behind_emitted_tokens(engine: Engine) -> None:
    whole = await collect(engine.decode(PROMPT, SAMPLED))
    rest = await collect(engine.decode(replace(PROMPT, emitted=whole.ids[:5]), SAMPLED))
    assert rest.ids == whole.ids[5:]


async def test_emitted_tokens_that_are_the_whole_answer_end_at_once(engine: Engine) -> None:
    rest = await collect(engine.decode(replace(PROMPT, emitted=(5, 6, 7)), greedy(3)))
    assert rest.ids == ()
    assert rest.finished.reason is FinishReason.LENGTH


async def test_a_stop_token_is_the_last_id(engine: Engine) -> None:
    whole = await collect(engine.decode(PROMPT, greedy(10)))
    stop = whole.ids[5]
    stopped = await collect(engine.decode(PROMPT, replace(greedy(10), stop_token_ids=frozenset({stop}))))
    assert stopped.ids == whole.ids[: whole.ids.index(stop) + 1]
    assert stopped.finished.reason is FinishReason.STOP_TOKEN


@pytest.mark.usefixtures("prefilling")
async def test_a_first_token_that_ends_the_request_holds_no_blocks(engine: Engine) -> None:
    held = await engine.prefill(PROMPT, greedy(1))
    assert held.finish_reason is FinishReason.LENGTH
    assert held.block_ids == ()
    assert engine.load().blocks_held == 0


@pytest.mark.usefixtures("seeded")
async def test_the_same_seed_gives_the_same_tokens_whatever_the_batch(engine: Engine) -> None:
    alone = await collect(engine.decode(PROMPT, SAMPLED))
    others = [Prompt((9, 8, index)) for index in range(4)]
    crowd = await asyncio.gather(*(collect(engine.decode(prompt, SAMPLED)) for prompt in [PROMPT, *others]))
    assert crowd[0].ids == alone.ids


@pytest.mark.usefixtures("seeded")
async def test_different_seeds_give_different_tokens(engine: Engine) -> None:
    first = await collect(engine.decode(PROMPT, SAMPLED))
    second = await collect(engine.decode(PROMPT, replace(SAMPLED, seed=8)))
    assert first.ids != second.ids


async def test_every_token_has_a_logprob_if_that_was_asked_for(engine: Engine) -> None:
    generated = await collect(engine.decode(PROMPT, replace(greedy(6), logprobs=2)))
    assert tuple(report.token_id for report in generated.logprobs) == generated.ids
    assert all(report.logprob <= 0.0 and len(report.top) == 2 for report in generated.logprobs)


async def test_a_reader_that_comes_late_gets_all_that_was_waiting_at_once(engine: Engine) -> None:
    async with aclosing(engine.decode(PROMPT, greedy(20))) as stream:
        first = await anext(stream)
        await eventually(lambda: engine.load().running == 0)
        await asyncio.sleep(0)
        rest = await anext(stream)
        end = await anext(stream)
    assert isinstance(first, Tokens)
    assert isinstance(rest, Tokens)
    assert isinstance(end, Finished)
    assert len(first.ids) + len(rest.ids) == 20


async def test_a_generation_ends_where_the_context_does(engine: Engine) -> None:
    limit = engine.facts.max_context_tokens
    generated = await collect(engine.decode(Prompt((7,) * (limit - 3)), greedy(100)))
    assert len(generated.ids) == 3
    assert generated.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [0, 256, 1000])
async def test_a_prompt_that_can_never_fit_is_refused_by_name(engine: Engine, length: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await collect(engine.decode(Prompt((5,) * length), greedy(2)))
    assert refused.value.violations[0].field == "prompt"


@pytest.mark.usefixtures("prefilling")
@pytest.mark.parametrize("length", [0, 256, 1000])
async def test_a_prefill_that_can_never_fit_is_refused_by_name(engine: Engine, length: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await engine.prefill(Prompt((5,) * length), greedy(2))
    assert refused.value.violations[0].field == "prompt"


async def test_ids_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        await collect(engine.decode(Prompt((engine.facts.vocab_size,)), greedy(2)))


@pytest.mark.usefixtures("prefilling")
async def test_a_prefill_of_ids_outside_the_vocabulary_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        await engine.prefill(Prompt((engine.facts.vocab_size,)), greedy(2))


async def test_a_stream_that_is_subscribed_to_gives_the_ids_of_one_that_is_iterated_over(engine: Engine) -> None:
    iterated = await collect(engine.decode(PROMPT, greedy(12)))
    async with aclosing(engine.generation(PROMPT, greedy(12))) as events:
        arrived = asyncio.Event()
        await events.subscribe(arrived.set)
        ids: list[int] = []
        end = None
        while end is None:
            await arrived.wait()
            arrived.clear()
            new, end = events.pull()
            ids += new
    assert tuple(ids) == iterated.ids
    assert end.reason is FinishReason.LENGTH
