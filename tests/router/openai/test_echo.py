"""/v1/completions with `echo`: the prompt before the answer, with log probabilities, as evaluation harnesses ask."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from support.clients.openai_api import openai_bench, post
from support.cluster.demo import demo_worker
from support.cluster.in_process import Bench
from support.engines.checkpoints import DEMO
from support.lifetimes import in_one_task
from transformers import AutoTokenizer, LlavaForConditionalGeneration

PROMPT, ANSWER = "Sort: pear apple mango", "apple mango pear"


@pytest.fixture
async def demo() -> AsyncIterator[Bench]:
    async with in_one_task(openai_bench(demo_worker("prefill"), demo_worker("decode"))) as running:
        yield running


async def choices(running: Bench, **fields: object) -> list[dict[str, Any]]:
    answer = await post(running, "/completions", {"model": "demo", "temperature": 0, "echo": True, **fields})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


def scored(ids: list[int]) -> tuple[list[float], list[float]]:
    """The checkpoint's value for each id from the second on, and for the likeliest in its place."""
    model = LlavaForConditionalGeneration.from_pretrained(DEMO, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
    of_ids = logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0]
    return of_ids.tolist(), logprobs.amax(-1).tolist()


async def test_a_prompt_has_the_log_probabilities_that_the_checkpoint_gives_it(demo: Bench) -> None:
    """With the options of lm-eval's local-completions: a prompt of ids in a list, and one token more."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = tokenizer(PROMPT + ANSWER)["input_ids"]
    (choice,) = await choices(demo, prompt=[ids], max_tokens=1, logprobs=1, seed=1234)
    found = choice["logprobs"]
    assert found["tokens"] == [tokenizer.decode([each]) for each in [*ids, tokenizer.eos_token_id]]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    own, best = scored(ids)
    assert found["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-3)
    assert [max(top.values()) for top in found["top_logprobs"][1:-1]] == pytest.approx(best, abs=1e-3)
    # A harness finds out by equality whether the answer is the greedy one.
    length = len(tokenizer(PROMPT)["input_ids"])
    pairs = [*zip(found["token_logprobs"], found["top_logprobs"], strict=True)]
    assert [logprob == max(top.values()) for logprob, top in pairs[length:-1]] == [True] * 3
    assert not any(logprob == max(top.values()) for logprob, top in pairs[1:length])


async def test_a_prompt_of_text_comes_before_each_answer(demo: Bench) -> None:
    plain = await choices(demo, prompt=PROMPT, max_tokens=8)
    assert [(each["text"], each["logprobs"]) for each in plain] == [(PROMPT + ANSWER, None)]
    two = await choices(demo, prompt=PROMPT, max_tokens=8, logprobs=2, n=2, temperature=1e-9)
    assert [each["text"] for each in two] == [PROMPT + ANSWER] * 2
    for each in two:
        logprobs = each["logprobs"]
        assert {len(values) for values in logprobs.values()} == {10}
        starts = [sum(map(len, logprobs["tokens"][:index])) for index in range(10)]
        assert logprobs["text_offset"] == starts
        assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2] * 9


async def test_an_echo_is_not_streamed(demo: Bench) -> None:
    answer = await post(demo, "/completions", {"model": "demo", "prompt": "a", "echo": True, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "echo"
