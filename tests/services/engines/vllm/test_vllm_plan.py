"""The continuation of an answer on vLLM, and refused sampling options; without vLLM."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.errors import Unsupported
from services.engines.external.requests import token_logprob
from services.engines.prompt import Prompt, Sampling
from services.engines.vllm.package import VllmPackage
from services.engines.vllm.requests.sampling import (
    Plan,
    TokenBudget,
    behind_emitted,
    check_sampling,
    plan,
    sampling_params,
)

PROMPT = Prompt((5, 6, 7), emitted=(8, 9))
GREEDY = Sampling(max_tokens=10, temperature=0.0)


def test_a_greedy_answer_continues_behind_its_emitted_tokens() -> None:
    assert plan(PROMPT, GREEDY) == Plan((5, 6, 7, 8, 9))


@pytest.mark.parametrize("changed", [{"temperature": 0.7}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}])
def test_an_answer_that_depends_on_its_start_runs_again_from_it(changed: dict[str, float]) -> None:
    assert plan(PROMPT, replace(GREEDY, **changed)) == Plan((5, 6, 7), (8, 9))


def test_an_answer_without_emitted_tokens_just_runs() -> None:
    assert plan(Prompt((5, 6)), replace(GREEDY, temperature=1.0)) == Plan((5, 6))


def test_the_budget_counts_the_emitted_tokens_once() -> None:
    sampling = replace(GREEDY, min_tokens=4)
    assert behind_emitted(PROMPT).budget(PROMPT, sampling, 100) == TokenBudget(8, 2)
    assert Plan(PROMPT.token_ids, PROMPT.emitted).budget(PROMPT, sampling, 100) == TokenBudget(10, 4)


def test_the_budget_ends_where_the_context_does() -> None:
    assert behind_emitted(PROMPT).budget(PROMPT, GREEDY, 8).max_tokens == 3


@pytest.mark.parametrize("temperature", [0.001, 0.0099])
def test_a_temperature_that_vllm_would_raise_is_refused_by_name(temperature: float) -> None:
    with pytest.raises(Unsupported, match=r"sampling\.params\.temperature"):
        check_sampling(replace(GREEDY, temperature=temperature))


def test_bad_words_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="bad_words"):
        check_sampling(replace(GREEDY, bad_sequences=((5, 6),)))


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_other_temperatures_are_taken(temperature: float) -> None:
    check_sampling(replace(GREEDY, temperature=temperature))


class _Logprob:
    def __init__(self, logprob: float) -> None:
        self.logprob = logprob


def test_the_sampled_token_has_its_logprob_wherever_it_ranks() -> None:
    report = token_logprob(9, {9: _Logprob(-5.0), 4: _Logprob(-1.0), 3: _Logprob(-0.5)}, 2)
    assert report.logprob == -5.0
    assert report.top == ((3, -0.5), (4, -1.0))


OPTIONS: dict[str, object] = {
    "stop_token_ids": frozenset({5}),
    "ignore_eos": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "seed": 7,
    "logit_bias": {5: 1.0},
    "bad_sequences": ((5, 6),),
    "logprobs": 2,
    "prompt_logprobs": 2,
}
# Followed by a budget, and by structured outputs: test_vllm_guided.py.
ELSEWHERE = {"max_tokens", "min_tokens", "guide"}


@pytest.mark.parametrize("name", [field.name for field in fields(Sampling) if field.name not in ELSEWHERE])
def test_every_option_reaches_vllm_or_is_refused(name: str) -> None:
    package = SimpleNamespace(
        version="0.32.0",
        output_kind=SimpleNamespace(DELTA="delta"),
        sampling_params=lambda **given: given,
        sampling_arguments={*OPTIONS, "max_tokens", "min_tokens", "detokenize", "output_kind"},
    )

    def passed(sampling: Sampling) -> dict[str, Any]:
        return sampling_params(cast("VllmPackage", package), sampling, TokenBudget(9, 0))

    try:
        assert passed(replace(Sampling(9), **{name: OPTIONS[name]})) != passed(Sampling(9))  # type: ignore[arg-type]
    except Unsupported:
        assert name == "bad_sequences"
