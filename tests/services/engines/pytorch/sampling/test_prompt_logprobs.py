"""Log probabilities of prompts are those of the plain library, whatever was cached and however it was divided."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from support.engines.checkpoints import DEMO, save_llama
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from services.engines.answer import Finished, PromptLogprobs, Tokens
from services.engines.kv import ReportedPrompt
from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine

PROMPT = tuple(range(5, 69))
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def engine(folder: Path, **options: object) -> PyTorchEngine:
    given = {"model": folder, "device": "cpu", "threads": 1, "kv_cache_bytes": 32 << 20, "max_sequences": 4, **options}
    return PyTorchEngine(PyTorchConfig.model_validate(given))


def expected(folder: Path, prompt: tuple[int, ...], top: int) -> PromptLogprobs:
    """By the plain library, in one piece."""
    kind = AutoModelForImageTextToText if folder == DEMO else AutoModelForCausalLM
    with torch.inference_mode():
        logits = kind.from_pretrained(folder, dtype=torch.float32).eval()(torch.tensor([prompt])).logits[0, :-1]
    logprobs = logits.log_softmax(-1)
    likeliest = logprobs.topk(top, -1)
    own = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return PromptLogprobs(
        tuple(own.tolist()),
        top,
        tuple(likeliest.indices.flatten().tolist()),
        tuple(likeliest.values.flatten().tolist()),
    )


def assert_equal(found: PromptLogprobs | None, reference: PromptLogprobs) -> None:
    assert found is not None
    assert found.logprobs == pytest.approx(reference.logprobs, abs=1e-3)
    assert found.top_logprobs == pytest.approx(reference.top_logprobs, abs=1e-3)
    assert (found.top, found.top_ids) == (reference.top, reference.top_ids)


async def decoded(events: AsyncGenerator[Tokens | Finished, None]) -> list[Tokens | Finished]:
    async with aclosing(events) as stream:
        return [event async for event in stream]


@pytest.mark.parametrize("step_tokens", [7, 512])
@pytest.mark.parametrize("execution", ["library", "fused"])
async def test_they_are_those_of_the_plain_library(execution: str, step_tokens: int, tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    async with engine(folder, execution=execution, max_step_tokens=step_tokens) as running:
        [first, *rest] = await decoded(running.decode(Prompt(PROMPT), Sampling(4, prompt_logprobs=2, **GREEDY)))
    assert isinstance(first, Tokens)
    assert_equal(first.prompt_logprobs, expected(folder, PROMPT, 2))
    assert all(event.prompt_logprobs is None for event in rest if isinstance(event, Tokens))


async def test_a_cached_prefix_is_computed_again_for_them_and_the_answer_stays() -> None:
    async with engine(DEMO) as running:
        plain = await decoded(running.decode(Prompt(PROMPT), Sampling(4, **GREEDY)))
        cached = await decoded(running.decode(Prompt(PROMPT), Sampling(4, **GREEDY)))
        reported = await decoded(running.decode(Prompt(PROMPT), Sampling(4, prompt_logprobs=0, **GREEDY)))
    assert isinstance(cached[-1], Finished)
    assert isinstance(reported[-1], Finished)
    assert (cached[-1].cached_tokens > 0, reported[-1].cached_tokens) == (True, 0)
    assert isinstance(reported[0], Tokens)
    assert_equal(reported[0].prompt_logprobs, expected(DEMO, PROMPT, 0))
    ids = [tuple(i for event in run if isinstance(event, Tokens) for i in event.ids) for run in (plain, reported)]
    assert ids[0] == ids[1]


async def test_a_prefill_has_them_and_what_continues_it_has_not() -> None:
    async with engine(DEMO) as running:
        held = await running.prefill(Prompt(PROMPT), Sampling(4, prompt_logprobs=1, **GREEDY))
        assert isinstance(held, ReportedPrompt)
        await held.release()
        sampling = Sampling(4, prompt_logprobs=1, **GREEDY)
        continued = await decoded(running.decode(Prompt(PROMPT, emitted=(held.first_token,)), sampling))
        single = await decoded(running.decode(Prompt(PROMPT[:1]), sampling))
    assert_equal(held.prompt_logprobs, expected(DEMO, PROMPT, 1))
    assert all(event.prompt_logprobs is None for event in continued if isinstance(event, Tokens))
    assert isinstance(single[0], Tokens)
    assert single[0].prompt_logprobs == PromptLogprobs((), 1)
