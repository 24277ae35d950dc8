"""Sampling from logits: each option compared with a plain computation of its meaning."""

from dataclasses import replace

import pytest
import torch

from services.engines.prompt import Prompt, Sampling
from services.engines.pytorch.sampling.sampling import Chosen, SamplerState, sample

VOCABULARY = 500
EOS = 2
PLAIN = Sampling(max_tokens=50, temperature=1.0, seed=3)
GREEDY = replace(PLAIN, temperature=0.0)
PROMPT = Prompt((5, 6, 6, 7), emitted=(9, 9, 11))


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def state(sampling: Sampling, prompt: Prompt = PROMPT) -> SamplerState:
    return SamplerState(prompt, sampling, frozenset({EOS}))


def choose(logits: torch.Tensor, sampling: Sampling, prompt: Prompt = PROMPT) -> int:
    [chosen] = sample(logits.clone(), [state(sampling, prompt)])
    assert chosen.token_id is not None
    return chosen.token_id


def drawn(sampling: Sampling, logits: torch.Tensor, count: int = 300) -> set[int]:
    """Returns the tokens sampled with many seeds."""
    return {choose(logits, replace(sampling, seed=seed)) for seed in range(count)}


def test_greedy_takes_the_likeliest() -> None:
    logits = logits_of(1)
    assert choose(logits, GREEDY) == int(logits.argmax())


def test_top_k_draws_only_from_the_k_likeliest() -> None:
    logits = logits_of(1) / 3
    assert drawn(replace(PLAIN, top_k=3), logits) == set(logits.topk(3).indices[0].tolist())


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_top_p_draws_only_from_the_smallest_set_that_reaches_it(top_p: float) -> None:
    logits = logits_of(1)
    order = logits[0].softmax(-1).sort(descending=True)
    size = int((order.values.cumsum(-1) < top_p).sum()) + 1
    nucleus = set(order.indices[:size].tolist())
    assert drawn(replace(PLAIN, top_p=top_p), logits) <= nucleus


def test_top_p_counts_within_what_top_k_leaves() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    # The first of the two likeliest has 0.57 on its own.
    assert {choose(logits, replace(PLAIN, top_k=2, top_p=0.55, seed=s), Prompt((1,))) for s in range(99)} == {0}


def test_a_nucleus_wider_than_the_first_candidates_is_complete() -> None:
    logits = torch.zeros(1, 9000)
    tokens = {choose(logits, replace(PLAIN, top_p=0.95, seed=seed), Prompt((1,))) for seed in range(200)}
    # The 128 candidates that are ranked first could never contain this many.
    assert len(tokens) > 190


def test_min_p_draws_only_what_is_likely_enough_beside_the_likeliest() -> None:
    logits = logits_of(1)
    probabilities = logits[0].softmax(-1)
    allowed = set((probabilities >= 0.2 * probabilities.max()).nonzero()[:, 0].tolist())
    assert drawn(replace(PLAIN, min_p=0.2), logits) == allowed


def test_drawing_follows_the_probabilities() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))
    draws = [choose(logits, replace(PLAIN, seed=seed), Prompt((1,))) for seed in range(4000)]
    shares = torch.bincount(torch.tensor(draws), minlength=4) / len(draws)
    assert torch.allclose(shares, logits.exp()[0], atol=0.03)


def test_temperature_sharpens() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))
    draws = [choose(logits, replace(PLAIN, temperature=0.5, seed=seed), Prompt((1,))) for seed in range(4000)]
    shares = torch.bincount(torch.tensor(draws), minlength=4) / len(draws)
    assert torch.allclose(shares, (logits * 2).softmax(-1)[0], atol=0.03)


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.7, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, -0.9), (1.3, 0.4, 0.6)]
)
def test_penalties_are_those_of_a_plain_loop_over_the_tokens(
    repetition: float, presence: float, frequency: float
) -> None:
    sampling = replace(
        GREEDY, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logprobs=None
    )
    for seed in range(30):
        logits = logits_of(seed)
        # Makes tokens of the context the likeliest, so that the penalty decides.
        logits[0, [5, 6, 9, 11]] = logits.max() + torch.tensor([0.1, 0.5, 1.0, 0.9])
        wanted = logits[0].clone()
        for token in set(PROMPT.context):
            wanted[token] = wanted[token] / repetition if wanted[token] > 0 else wanted[token] * repetition
        for token in set(PROMPT.emitted):
            wanted[token] -= presence + frequency * PROMPT.emitted.count(token)
        assert choose(logits, sampling) == int(wanted.argmax())


def test_penalties_count_tokens_as_they_are_chosen() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 40], logits[0, 41] = 1.0, 0.5
    remembering = state(replace(GREEDY, frequency_penalty=0.4))
    tokens = []
    for _ in range(4):
        [chosen] = sample(logits.clone(), [remembering])
        assert chosen.token_id is not None
        remembering.append(chosen.token_id)
        tokens.append(chosen.token_id)
    assert tokens == [40, 40, 41, 40]


def test_a_logit_bias_is_added() -> None:
    assert choose(logits_of(1), replace(GREEDY, logit_bias={77: 100.0})) == 77


def test_an_end_is_not_chosen_before_min_tokens() -> None:
    logits = logits_of(1)
    logits[0, EOS], logits[0, 30] = 90.0, 80.0
    sampling = replace(GREEDY, min_tokens=4, stop_token_ids=frozenset({30}))
    assert choose(logits, sampling) not in {EOS, 30}
    assert choose(logits, replace(sampling, min_tokens=3)) == EOS


def test_an_ignored_end_of_sequence_may_be_chosen_before_min_tokens() -> None:
    logits = logits_of(1)
    logits[0, EOS] = 90.0
    assert choose(logits, replace(GREEDY, min_tokens=9, ignore_eos=True)) == EOS


def test_logprobs_are_of_the_logits_as_the_model_gave_them() -> None:
    logits = logits_of(1)
    wanted = logits[0].log_softmax(-1)
    sampling = replace(PLAIN, temperature=0.3, top_k=5, repetition_penalty=1.5, logit_bias={3: 9.0}, logprobs=4)
    [chosen] = sample(logits.clone(), [state(sampling)])
    assert chosen.logprob is not None
    assert chosen.logprob.token_id == chosen.token_id
    assert chosen.logprob.logprob == pytest.approx(float(wanted[chosen.logprob.token_id]))
    assert [token for token, _ in chosen.logprob.top] == wanted.topk(4).indices.tolist()
    assert [value for _, value in chosen.logprob.top] == pytest.approx(wanted.topk(4).values.tolist())


def test_zero_logprobs_report_the_chosen_token_alone() -> None:
    [chosen] = sample(logits_of(1), [state(replace(GREEDY, logprobs=0))])
    assert chosen.logprob is not None
    assert chosen.logprob.top == ()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    options = [
        GREEDY,
        replace(GREEDY, logprobs=2),
        PLAIN,
        replace(PLAIN, top_k=7),
        replace(PLAIN, top_p=0.8),
        replace(PLAIN, top_p=0.99, top_k=300),
        replace(PLAIN, min_p=0.05, frequency_penalty=0.5),
        replace(PLAIN, repetition_penalty=1.4, temperature=1.9),
        replace(PLAIN, logit_bias={4: 5.0}, min_tokens=9),
    ]
    logits = logits_of(5, len(options))
    together = [chosen.token_id for chosen in sample(logits.clone(), [state(option) for option in options])]
    assert together == [choose(logits[row : row + 1], option) for row, option in enumerate(options)]


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, replace(PLAIN, top_p=0.5)])
def test_logits_that_are_no_numbers_choose_nothing_and_spare_the_other_rows(sampling: Sampling) -> None:
    logits = logits_of(1, 3)
    good = choose(logits[:1], sampling)
    logits[1, 17] = torch.nan
    logits[2, 17] = torch.inf
    chosen = sample(logits, [state(sampling), state(sampling), state(sampling)])
    assert chosen == [Chosen(good), Chosen(None), Chosen(None)]


def test_noise_belongs_to_the_position_in_the_whole_context() -> None:
    logits = torch.zeros(1, VOCABULARY)
    at_five = choose(logits, PLAIN, Prompt((1, 1, 1, 1, 1)))
    assert choose(logits, PLAIN, Prompt((2, 3), emitted=(4, 5, 6))) == at_five
    assert choose(logits, PLAIN, Prompt((1, 1, 1, 1))) != at_five
