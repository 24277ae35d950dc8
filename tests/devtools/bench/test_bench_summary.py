"""The figures of a step of `baton bench`, from answers whose times are known."""

import pytest

from devtools.bench.load import Measured
from devtools.bench.report import Percentiles, Targets, summarize

# At 0, 1 and 2 s; 10 ms, 20 ms and 30 ms from a token to the next one.
ANSWERS = [
    Measured(
        at_seconds=number,
        first_token_seconds=0.5,
        seconds=0.5 + 10 * 0.01 * (number + 1),
        prompt_tokens=100,
        cached_tokens=20 * number,
        output_tokens=11,
        asked_tokens=11 + number // 2,
        worker_id="p1",
    )
    for number in range(3)
]


def test_the_time_of_a_token_is_the_mean_of_the_gaps_after_the_first() -> None:
    assert [answer.token_seconds for answer in ANSWERS] == pytest.approx([0.01, 0.02, 0.03])
    assert Measured(0, first_token_seconds=0.5, seconds=0.5, prompt_tokens=1, output_tokens=1).token_seconds == 0


def test_times_and_rates_of_a_step_are_those_of_its_answers() -> None:
    step = summarize("three", ANSWERS, Targets())
    assert (step.requests, step.failed, step.short, step.good_share) == (3, 0, 1, 1.0)
    assert (step.first_token.p50, step.token.p50, step.whole.p50) == pytest.approx((0.5, 0.02, 0.7))
    assert step.seconds == pytest.approx(2.8)
    assert step.requests_per_second == pytest.approx(3 / 2.8)
    assert step.output_tokens_per_second == pytest.approx(33 / 2.8)
    assert step.hit_rate == pytest.approx(60 / 300)


def test_a_failure_counts_with_its_error_and_not_in_the_times() -> None:
    failed = Measured(at_seconds=0, first_token_seconds=0, seconds=9, prompt_tokens=100, error="Overloaded")
    step = summarize("four", [*ANSWERS, failed], Targets())
    assert (step.failed, step.errors, step.good_share) == (1, {"Overloaded": 1}, 0.75)
    assert step.whole.p99 < 1
    assert step.requests_per_second == pytest.approx(3 / 9)


@pytest.mark.parametrize(
    ("targets", "good"),
    [(Targets(first_token_seconds=0.5), 3), (Targets(first_token_seconds=0.4), 0), (Targets(token_seconds=0.025), 2)],
)
def test_an_answer_is_good_within_both_targets(targets: Targets, good: int) -> None:
    step = summarize("three", ANSWERS, targets)
    assert step.good_share == pytest.approx(good / 3)
    assert step.goodput == pytest.approx(good / 2.8)


def test_percentiles_of_one_time_are_that_time() -> None:
    assert Percentiles.of([0.3]) == Percentiles(0.3, 0.3, 0.3)
    assert Percentiles.of([]) == Percentiles(0.0, 0.0, 0.0)
