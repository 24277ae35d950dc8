"""The predicted time of a request, with workers and a clock that the test sets."""

import pytest
from support.clock import ManualClock
from support.router.measured_workers import Measured, StaticFleet, measured

from router.admission.predictor import LatencyPredictor, RequestEstimate


class Predicting:
    """A forecast for workers that compute 1,000 prompt tokens a second and take 0.1 s a token, or others."""

    def __init__(self, *workers: Measured, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.workers = workers or (
            measured(self.clock, "prefill", tokens_per_second=1000),
            measured(self.clock, "decode", token_seconds=0.1),
        )
        self.forecast = LatencyPredictor(StaticFleet(self.workers), self.clock)

    def seconds(self, prompt: int = 0, max_tokens: int | None = None, model: str = "m") -> float | None:
        return self.forecast.seconds(RequestEstimate(model, prompt, max_tokens))

    def learn(self, max_tokens: int | None, generated: int, model: str = "m") -> None:
        for _ in range(4):
            self.forecast.learn(RequestEstimate(model, 1, max_tokens), generated)


def test_prompt_and_answer_add_up() -> None:
    predicting = Predicting()
    predicting.learn(max_tokens=None, generated=50)
    assert predicting.seconds(prompt=2000) == pytest.approx(2.0 + 5.0)


def test_prompts_that_wait_are_computed_first() -> None:
    predicting = Predicting()
    predicting.workers[0].latency.prompts.begin(3000)
    assert predicting.seconds(prompt=1000, max_tokens=1) == pytest.approx(4.0)


def test_how_much_of_max_tokens_is_used_is_learned() -> None:
    predicting = Predicting()
    assert predicting.seconds(max_tokens=100) == pytest.approx(0.0)
    predicting.learn(max_tokens=200, generated=50)
    assert predicting.seconds(max_tokens=100) == pytest.approx(100 * 0.25 * 0.1)


def test_what_one_model_s_answers_are_like_says_nothing_of_another_s() -> None:
    clock = ManualClock()
    predicting = Predicting(
        measured(clock, "prefill", "decode", model="slow", tokens_per_second=1e6, token_seconds=0.01),
        measured(clock, "prefill", "decode", model="quick", tokens_per_second=1e6, token_seconds=0.01),
        clock=clock,
    )
    predicting.learn(max_tokens=None, generated=1120, model="slow")
    predicting.learn(max_tokens=None, generated=2, model="quick")
    assert predicting.seconds(model="quick") == pytest.approx(0.02)
    assert predicting.seconds(model="slow") == pytest.approx(11.2)


def test_the_quickest_worker_counts() -> None:
    clock = ManualClock()
    predicting = Predicting(
        measured(clock, "decode", tokens_per_second=10, token_seconds=1.0),
        measured(clock, "decode", tokens_per_second=1000, token_seconds=0.1),
        clock=clock,
    )
    assert predicting.seconds(prompt=1000, max_tokens=0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "other",
    [{"problem": "it hangs"}, {"draining": True}, {"model": "another"}],
    ids=["not ready", "draining", "of another model"],
)
def test_a_worker_that_cannot_be_used_says_nothing(other: dict[str, object]) -> None:
    clock = ManualClock()
    quick = measured(clock, "decode", tokens_per_second=1e6, token_seconds=1e-6, **other)  # type: ignore[arg-type]
    slow = measured(clock, "decode", tokens_per_second=1000, token_seconds=0.1)
    predicting = Predicting(quick, slow, clock=clock)
    assert predicting.seconds(prompt=1000, max_tokens=1) == pytest.approx(1.0)


def test_a_worker_that_was_not_measured_may_be_quick() -> None:
    clock = ManualClock()
    predicting = Predicting(
        measured(clock, "decode", tokens_per_second=1000, token_seconds=0.1), measured(clock, "decode"), clock=clock
    )
    assert predicting.seconds(prompt=1000) is None


def test_nothing_is_known_without_workers() -> None:
    assert Predicting(measured(ManualClock(), "encode")).seconds() is None


def test_what_was_measured_long_ago_is_not_known() -> None:
    predicting = Predicting()
    assert predicting.seconds(prompt=1000) is not None
    predicting.clock.advance(10)
    assert predicting.seconds(prompt=1000) is None


def test_where_all_sleep_a_request_takes_at_least_the_time_to_wake() -> None:
    clock = ManualClock()
    predicting = Predicting(measured(clock, "decode"), measured(clock, "decode"), clock=clock)
    assert predicting.seconds(max_tokens=1) is None
    for worker, seconds in zip(predicting.workers, (7.0, 3.0), strict=True):
        worker.wake_seconds = seconds
    assert predicting.seconds(max_tokens=1) == 3.0


def test_a_worker_that_is_awake_needs_no_time_to_wake() -> None:
    predicting = Predicting()
    sleeping = measured(predicting.clock, "decode", token_seconds=0.1)
    sleeping.wake_seconds = 9.0
    predicting.forecast = LatencyPredictor(StaticFleet([*predicting.workers, sleeping]), predicting.clock)
    assert predicting.seconds(prompt=1000, max_tokens=1) == pytest.approx(1.0)


def test_a_flood_of_tiny_prompts_makes_no_other_request_hopeless() -> None:
    predicting = Predicting()
    predicting.learn(max_tokens=None, generated=1)
    clock, prompts = predicting.clock, predicting.workers[0].latency.prompts
    clock.advance(60)
    for _ in range(200):
        flood = [prompts.begin(4) for _ in range(2)]
        clock.advance(0.3)
        for one in flood:
            prompts.end(one, is_done=True)
        predicting.workers[1].latency.token_seconds.add(0.1)
    predicting.learn(max_tokens=None, generated=1)
    assert 0.1 < (predicting.seconds(prompt=100) or 0.0) < 1.0
    assert 0.1 < (predicting.seconds(prompt=3000) or 0.0) < 1.0
