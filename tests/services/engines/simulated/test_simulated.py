"""Guarantees of the simulated engine only: ids that follow from the context, and steps at the configured cost."""

import asyncio
import json
import math
import time
from collections.abc import Coroutine
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.engines.engine_calls import collect, pull
from support.eventually import eventually
from tokenizers import Tokenizer

from baton.errors import ConfigError, EngineFailed
from runtime.aio import timeout
from services.engines.answer import FinishReason
from services.engines.kv import PulledKv
from services.engines.prompt import Embedding, MediaSpan, Prompt, Sampling
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.encoder import embedding_data
from services.engines.simulated.engine import SimulatedEngine

PROMPT = Prompt(tuple(b"a prompt of some length"))


def sampled(max_tokens: int, seed: int = 1) -> Sampling:
    return Sampling(max_tokens=max_tokens, seed=seed)


async def ids(engine: SimulatedEngine, prompt: Prompt | PulledKv, sampling: Sampling) -> tuple[int, ...]:
    return (await collect(engine.decode(prompt, sampling))).ids


async def test_ids_depend_on_the_seed() -> None:
    async with SimulatedEngine(SimulatedConfig()) as engine:
        assert await ids(engine, PROMPT, sampled(20, 1)) != await ids(engine, PROMPT, sampled(20, 2))


async def test_greedy_ids_do_not_depend_on_the_seed() -> None:
    async with SimulatedEngine(SimulatedConfig()) as engine:
        greedy = [Sampling(max_tokens=20, temperature=0, seed=seed) for seed in (1, 2)]
        assert await ids(engine, PROMPT, greedy[0]) == await ids(engine, PROMPT, greedy[1])


async def test_where_the_prompt_ends_and_the_emitted_ids_begin_makes_no_difference() -> None:
    async with SimulatedEngine(SimulatedConfig()) as engine:
        whole = await ids(engine, PROMPT, sampled(30))
        as_prompt = await ids(engine, Prompt(PROMPT.token_ids + whole[:9]), sampled(21))
        assert as_prompt == whole[9:]


async def test_its_own_tokenizer_turns_ids_into_text_and_text_into_bytes() -> None:
    async with SimulatedEngine(SimulatedConfig()) as engine:
        tokenizer = Tokenizer.from_buffer(engine.facts.files.tokenizer_json)
        assert tokenizer.encode("héllo wörld\n", add_special_tokens=False).ids == list("héllo wörld\n".encode())
        text = tokenizer.decode(list(await ids(engine, PROMPT, sampled(50))))
        assert len(text) == 50
        assert text.replace(" ", "a").isalpha()


async def test_the_tokenizer_of_a_checkpoint_is_used_as_it_is(tmp_path: Path) -> None:
    async with SimulatedEngine(SimulatedConfig()) as engine:
        (tmp_path / "tokenizer.json").write_bytes(engine.facts.files.tokenizer_json)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    async with SimulatedEngine(SimulatedConfig(model=str(tmp_path))) as engine:
        assert engine.facts.eos_token_ids == (256,)
        assert engine.facts.files.chat_template == "{{ messages }}"


def test_a_folder_without_a_tokenizer_is_refused_by_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        SimulatedEngine(SimulatedConfig(model=str(tmp_path)))


def test_a_broken_tokenizer_is_refused_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("not JSON")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        SimulatedEngine(SimulatedConfig(model=str(tmp_path)))


async def test_an_answer_may_end_by_itself() -> None:
    async with SimulatedEngine(SimulatedConfig(end_probability=0.2)) as engine:
        ended = await collect(engine.decode(PROMPT, sampled(500)))
        assert ended.finished.reason is FinishReason.END_OF_SEQUENCE
        assert ended.ids[-1] == 256


async def test_a_banned_end_of_sequence_ends_no_answer() -> None:
    async with SimulatedEngine(SimulatedConfig(end_probability=0.2)) as engine:
        bad = replace(sampled(100), bad_sequences=((256,),))
        assert len(await ids(engine, PROMPT, bad)) == 100
        held = await ids(engine, PROMPT, replace(sampled(100), min_tokens=60))
        assert 256 not in held[:60]
        assert len(held) > 60


async def test_a_bias_makes_an_id_as_likely_as_its_exponential_says() -> None:
    async with SimulatedEngine(SimulatedConfig()) as engine:
        # Four times as likely as each of the 26 others.
        likelier = await ids(engine, PROMPT, replace(sampled(3000), logit_bias={ord("q"): math.log(4)}))
        assert 0.11 < likelier.count(ord("q")) / 3000 < 0.16
        # By temperature 0.5 sixteen times.
        sharp = replace(sampled(3000), logit_bias={ord("q"): math.log(4)}, temperature=0.5)
        assert 0.34 < (await ids(engine, PROMPT, sharp)).count(ord("q")) / 3000 < 0.42


async def test_options_that_change_nothing_among_equal_ids_change_none() -> None:
    async with SimulatedEngine(SimulatedConfig()) as engine:
        plain = await ids(engine, PROMPT, sampled(30))
        for option in ({"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.5}):
            assert await ids(engine, PROMPT, replace(sampled(30), **option)) == plain


async def test_a_prefill_costs_its_tokens() -> None:
    config = SimulatedConfig(prefill_base_seconds=0.05, prefill_tokens_per_second=1000)
    async with SimulatedEngine(config) as engine:
        held = await engine.prefill(Prompt((1,) * 100), sampled(5))
        await held.release()
        assert 0.15 <= held.compute_seconds < 20


async def test_what_is_cached_costs_nothing() -> None:
    async with SimulatedEngine(SimulatedConfig(prefill_tokens_per_second=100)) as engine:
        await (await engine.prefill(Prompt((1,) * 101), sampled(5))).release()
        seconds = []
        for _ in range(3):  # a busy machine may be late, but not each time
            held = await engine.prefill(Prompt((1,) * 101), sampled(5))
            await held.release()
            assert held.cached_tokens == 96
            seconds.append(held.compute_seconds)
        # All of it would take a second.
        assert min(seconds) < 0.8


async def test_running_sequences_step_together() -> None:
    async with SimulatedEngine(SimulatedConfig(decode_step_seconds=0.01)) as engine:
        started = time.monotonic()
        await asyncio.gather(*(ids(engine, Prompt((index,) * 5), sampled(20)) for index in range(1, 33)))
        # One after another they would take 32 times as long.
        assert 0.19 <= time.monotonic() - started < 32 * 0.19


async def test_a_full_batch_makes_the_next_one_wait() -> None:
    async with SimulatedEngine(SimulatedConfig(decode_step_seconds=0.01, max_batch=1)) as engine:
        first, second = await asyncio.gather(*(collect(engine.decode(PROMPT, sampled(10, seed))) for seed in (1, 2)))
        assert first.finished.queue_seconds < second.finished.queue_seconds
        assert second.finished.queue_seconds >= 0.05


async def test_blocks_are_reserved_and_their_sequence_joins_the_batch_while_a_step_runs() -> None:
    slow = SimulatedConfig(decode_step_seconds=600.0)
    async with SimulatedEngine(SimulatedConfig()) as owner, SimulatedEngine(slow) as engine, timeout(60):
        held = await owner.prefill(PROMPT, sampled(3))
        step = asyncio.ensure_future(ids(engine, Prompt((7,) * 5), sampled(3)))
        await eventually(lambda: engine.load().running == 1)
        following = Prompt(PROMPT.token_ids, (held.first_token,))
        reservation = await engine.reserve(following, held.num_tokens)
        await pull(owner, held, engine, reservation)
        joined = asyncio.ensure_future(ids(engine, PulledKv(following, reservation), sampled(3)))
        await eventually(lambda: engine.load().running == 2)
        for task in (step, joined):
            task.cancel()
        await asyncio.wait((step, joined))
        await held.release()


async def test_pulled_kv_that_waits_for_the_batch_does_not_hold_up_the_running_one_for_ever() -> None:
    small = SimulatedConfig(num_blocks=4, max_batch=1)
    async with SimulatedEngine(SimulatedConfig()) as owner, SimulatedEngine(small) as engine, timeout(60):
        pulled = [await _pulled_picture(owner, engine, number) for number in (1, 2)]
        outcomes = await asyncio.gather(*pulled, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["HandoffLost", "tuple"]
        assert engine.load().blocks_used == 0


async def _pulled_picture(
    owner: SimulatedEngine, engine: SimulatedEngine, number: int
) -> Coroutine[Any, Any, tuple[int, ...]]:
    """A decode of 24 tokens from KV of two full blocks, of a picture that cannot be computed there."""
    token_ids = (number,) * 32
    embedding = Embedding(bytes([number]), (4, 8), "float32", embedding_data(bytes([number]), (4, 8)))
    held = await owner.prefill(Prompt(token_ids, media=(MediaSpan(0, 4, embedding.digest, embedding),)), sampled(24))
    following = Prompt(token_ids, (held.first_token,), media=(MediaSpan(0, 4, embedding.digest),))
    reservation = await engine.reserve(following, held.num_tokens)
    await pull(owner, held, engine, reservation)
    return ids(engine, PulledKv(following, reservation), sampled(24))


async def test_wrong_bytes_in_pulled_blocks_fail_the_request_and_not_the_engine() -> None:
    async with SimulatedEngine(SimulatedConfig()) as engine:
        reservation = await engine.reserve(Prompt(PROMPT.token_ids, (5,)), len(PROMPT.token_ids))
        with pytest.raises(EngineFailed, match="does not belong"):
            await collect(engine.decode(PulledKv(Prompt(PROMPT.token_ids, (5,)), reservation), sampled(9)))
        assert engine.healthy
        assert engine.load().blocks_used == 0


async def test_an_engine_that_fails_fails_every_request_from_then_on() -> None:
    async with SimulatedEngine(SimulatedConfig(fail_after_tokens=5)) as engine:
        for _ in range(2):
            with pytest.raises(EngineFailed):
                await ids(engine, PROMPT, sampled(9))
        assert not engine.healthy


@pytest.mark.parametrize("ends", ["a lease", "a decode"])
async def test_the_blocks_of_a_very_long_prompt_become_free_in_pieces(ends: str) -> None:
    block_tokens, num_blocks = 16, 10_000
    config = SimulatedConfig(
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        max_context_tokens=num_blocks * block_tokens,
        prefill_chunk_tokens=num_blocks * block_tokens,
    )
    prompt = Prompt((7,) * (num_blocks // 2 * block_tokens))
    async with SimulatedEngine(config) as engine:
        if ends == "a lease":
            await (await engine.prefill(prompt, sampled(1))).release()
        else:
            await ids(engine, prompt, sampled(1))
        used = [engine.load().blocks_used]
        async with timeout(30):
            while used[-1]:
                await asyncio.sleep(0)
                used.append(engine.load().blocks_used)
    assert max(before - after for before, after in pairwise((num_blocks // 2 + 1, *used))) < num_blocks // 4
