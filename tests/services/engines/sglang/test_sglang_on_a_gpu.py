"""Answers of SGLang over two engines on a GPU, up to 4,000 tokens and 64 at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from support.engines import sglang
from support.engines.checkpoints import save_qwen3
from support.engines.engine_calls import collect, greedy
from support.eventually import eventually

from services.engines.context import EngineContext
from services.engines.external.surroundings import free_ports
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt, Sampling
from services.engines.sglang.config import SglangConfig
from services.engines.sglang.engine import SglangEngine
from services.engines.sglang.factory import open_sglang

pytestmark = [pytest.mark.requires_sglang, pytest.mark.timeout(900)]

ARGUMENTS = {
    "context_length": 4200,
    "max_total_tokens": 320_000,
    "max_running_requests": 64,
    "chunked_prefill_size": 4096,
    "num_reserved_decode_tokens": 64,
}
LENGTHS = [5 + (index * 3995) // 39 for index in range(40)]
WAYS = {"greedy": greedy(16), "seeded": Sampling(max_tokens=16, temperature=0.9, seed=5, ignore_eos=True)}


@dataclass(frozen=True, slots=True)
class Three:
    """Both sides, and an engine of whole requests."""

    prefill: SglangEngine
    decode: SglangEngine
    whole: SglangEngine


@pytest_asyncio.fixture
async def three(tmp_path: Path) -> AsyncIterator[Three]:
    if not sglang.ON_GPU:
        pytest.skip("BATON_TEST_DEVICE=cuda runs this test")
    with sglang.installed():
        config = sglang.settings(save_qwen3(tmp_path, sglang.HEAD_DIM, 8192), free_ports("127.0.0.1", 1), ARGUMENTS)
        roles = ("prefill", False), ("decode", False), ("decode", True)
        made = [{**config, "whole_requests": is_whole, "max_waiting": 64} for _, is_whole in roles]
        engines = [
            open_sglang(SglangConfig.model_validate(each), EngineContext(roles=(role,)))
            for each, (role, _) in zip(made, roles, strict=True)
        ]
        async with AsyncExitStack() as stack:
            opened = await asyncio.gather(*(each.__aenter__() for each in engines))
            for each in engines:
                stack.push_async_exit(each)
            prefill, decode, whole = opened
            assert isinstance(prefill, SglangEngine)
            assert isinstance(decode, SglangEngine)
            assert isinstance(whole, SglangEngine)
            yield Three(prefill, decode, whole)


def _prompt(length: int) -> Prompt:
    return Prompt(tuple((index * index + 13 * length) % 300 + 10 for index in range(length)))


async def _answer(three: Three, number: int, sampling: Sampling) -> tuple[int, ...]:
    """Every fourth prompt is computed by the decode engine itself."""
    prompt = _prompt(LENGTHS[number % 40])
    if number % 4 == 3:
        return (await collect(three.decode.decode(prompt, sampling))).ids
    room = await three.decode.allocate(prompt, sampling, "127.0.0.1:1")
    held = await three.prefill.prefill_into(prompt, sampling, room.engine_state)
    source = RemoteKv(replace(prompt, emitted=(held.first_token,)), prompt.num_tokens, room.engine_state, room)
    return (held.first_token, *(await collect(await three.decode.decode_remote(source, sampling))).ids)


async def test_long_answers_over_two_engines_are_those_of_one(three: Three) -> None:
    for name, sampling in WAYS.items():
        whole = [(await collect(three.whole.decode(_prompt(length), sampling))).ids for length in LENGTHS]
        alone = [await _answer(three, number, sampling) for number in range(40)]
        crowd = await asyncio.gather(*(_answer(three, number, sampling) for number in range(64)))
        equal = sum(one == other for one, other in zip(alone, whole, strict=True))
        together = sum(one == whole[number % 40] for number, one in enumerate(crowd))
        print(f"{name}: alone {equal} of 40 equal, 64 at a time {together} of 64 equal", flush=True)
        assert (equal, together) == (40, 64)
    await eventually(lambda: three.prefill.load().blocks_used == three.decode.load().blocks_used == 0)
