"""The speed of a worker, with a clock that the test sets."""

import random

import pytest
from support.clock import ManualClock

from baton.inference.v1 import timing_pb2
from router.routing.latency import Average, DecodeTimer, Throughput, WorkerLatency


def work(speed: Throughput, clock: ManualClock, tokens: int, seconds: float) -> None:
    begun = speed.begin(tokens)
    clock.advance(seconds)
    speed.end(begun, is_done=True)


def test_a_throughput_is_not_known_before_some_measurements() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    for _ in range(3):
        work(speed, clock, 100, 0.1)
        assert speed.per_second is None
    work(speed, clock, 100, 0.1)
    assert speed.per_second == pytest.approx(1000)


def test_idle_time_does_not_count() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    for _ in range(4):
        work(speed, clock, 100, 0.1)
        clock.advance(4)
    assert speed.per_second == pytest.approx(1000)


def test_requests_side_by_side_are_one_stretch_of_work() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    work = [speed.begin(100) for _ in range(4)]
    assert speed.waiting_tokens == 400
    for each in work:
        clock.advance(0.1)
        speed.end(each, is_done=True)
    assert speed.waiting_tokens == 0
    assert speed.per_second == pytest.approx(1000)


def test_work_that_failed_measures_nothing() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    for _ in range(4):
        speed.end(speed.begin(100), is_done=False)
    assert speed.per_second is None
    assert speed.waiting_tokens == 0


def test_the_time_of_cancelled_work_is_charged_to_no_other() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    cancelled = speed.begin(100)
    for _ in range(4):
        # One of them always runs.
        clock.advance(60)
        following = speed.begin(100)
        speed.end(cancelled, is_done=False)
        cancelled = following
        work(speed, clock, 100, 0.2)
    # 200 tokens, of which 100 were given up, were 0.2 s.
    assert speed.per_second == pytest.approx(1000)
    assert speed.waiting_tokens == 100


def test_small_work_among_much_that_is_cancelled_predicts_the_wait_that_it_has_had() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    for _ in range(8):
        others = [speed.begin(10_000) for _ in range(100)]
        mine = speed.begin(10)
        clock.advance(0.2)
        speed.end(mine, is_done=True)
        clock.advance(0.3)
        for other in others:
            speed.end(other, is_done=False)
    for _ in range(100):
        speed.begin(10_000)
    assert speed.per_second is not None
    assert (speed.waiting_tokens + 10) / speed.per_second == pytest.approx(0.2)
    assert speed.seconds(10) == pytest.approx(0.2)


def test_a_bad_minute_is_forgotten_with_time() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    for _ in range(100):
        work(speed, clock, 100, 10.0)
    clock.advance(60)
    for _ in range(4):
        work(speed, clock, 100, 0.1)
    assert speed.per_second == pytest.approx(1000, rel=0.3)


def test_a_throughput_follows_a_change_of_speed() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    for _ in range(100):
        work(speed, clock, 100, 0.1)
    for _ in range(100):
        work(speed, clock, 100, 0.5)
    assert speed.per_second == pytest.approx(200, rel=0.05)


def test_what_was_measured_long_ago_is_not_known() -> None:
    clock = ManualClock()
    speed, average = Throughput(clock), Average(clock=clock)
    for _ in range(4):
        work(speed, clock, 100, 0.1)
        average.add(1.0)
    clock.advance(4.9)
    assert speed.per_second is not None
    assert average.value == pytest.approx(1.0)
    clock.advance(0.2)
    assert speed.per_second is None
    assert average.value is None


def test_an_average_is_of_the_last_measurements() -> None:
    average = Average(of=8, clock=ManualClock())
    for _ in range(8):
        average.add(1.0)
    for _ in range(100):
        average.add(3.0)
    assert average.value == pytest.approx(3.0, rel=0.01)


def decoded(pace: WorkerLatency, clock: ManualClock, prompt_tokens: int = 0) -> DecodeTimer:
    """A decode that waits 0.5 s for its first step; its four tokens are 0.1 s apart, and their reader is slower."""
    timer = DecodeTimer(pace, prompt_tokens, emitted=1)
    clock.advance(0.5)
    timer.accepted()
    timer.got_tokens(1)
    for _ in range(4):
        clock.advance(0.7)  # our reader is slow
        timer.waits_for_more()
        clock.advance(0.1)
        timer.got_tokens(1)
    return timer


def test_the_time_between_tokens_is_the_worker_s_and_not_the_reader_s() -> None:
    clock = ManualClock()
    pace = WorkerLatency(clock)
    decoded(pace, clock)
    assert pace.recent_token_seconds.value == pytest.approx(0.1)


def test_the_wait_for_the_first_step_is_measured_only_of_what_was_pulled() -> None:
    clock = ManualClock()
    pace = WorkerLatency(clock)
    for _ in range(4):
        DecodeTimer(pace, 0, emitted=1).accepted()
        timer = DecodeTimer(pace, 100, emitted=0)
        clock.advance(1.0)
        timer.accepted()
        timer.got_tokens(1)
    assert pace.entry_seconds.value == pytest.approx(0.0)
    assert pace.prompts.per_second == pytest.approx(100)


def test_a_decode_that_ends_before_its_prompt_is_done_leaves_no_waiting_tokens() -> None:
    pace = WorkerLatency(ManualClock())
    timer = DecodeTimer(pace, 100, emitted=0)
    assert pace.prompts.waiting_tokens == 100
    timer.end()
    timer.end()
    assert pace.prompts.waiting_tokens == 0


def test_a_whole_answer_s_pace_is_the_worker_s_own_word() -> None:
    clock = ManualClock()
    pace = WorkerLatency(clock)
    stage = timing_pb2.StageTiming(stage=timing_pb2.STAGE_DECODE)
    stage.duration.FromNanoseconds(400_000_000)
    for _ in range(4):
        decoded(pace, clock).finished([stage], generated=5)
    assert pace.token_seconds.value == pytest.approx(0.1)


def test_many_tiny_prompts_make_no_longer_one_look_hopeless() -> None:
    """A tenant that sends them would have every other tenant's prompts refused."""
    clock = ManualClock()
    speed = Throughput(clock)
    for _ in range(1000):
        work(speed, clock, 4, 0.08)
    assert speed.seconds(100) == pytest.approx(0.08)
    assert speed.seconds(8000) == pytest.approx(0.08)
    for length in (100, 8000):
        work(speed, clock, length, 0.08 + length * 1e-5)
        for _ in range(10):
            work(speed, clock, 4, 0.08)
    assert speed.seconds(100) == pytest.approx(0.08, rel=0.1)
    assert speed.seconds(8000) == pytest.approx(0.16, rel=0.1)


def test_a_long_prompt_that_waits_makes_none_behind_it_look_hopeless() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    for _ in range(100):
        work(speed, clock, 4, 0.08)
    waiting = speed.begin(8000)
    assert speed.seconds(4) == pytest.approx(0.16)
    for _ in range(10):
        work(speed, clock, 4, 0.08)
        assert (speed.seconds(4) or 0.0) < 0.2
    speed.end(waiting, is_done=False)
    assert 0.0 < (speed.seconds(4) or 0.0) < 0.1


def test_few_huge_prompts_make_no_tiny_one_look_slow() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    for _ in range(10):
        work(speed, clock, 50_000, 10.0)
        work(speed, clock, 50, 0.05)
    assert (speed.seconds(50) or 0.0) <= 0.1


def test_the_seconds_of_a_prompt_and_of_its_tokens_are_told_apart_behind_others() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    for count in (1, 20, 5, 40):
        others = [speed.begin(4) for _ in range(count)]
        mine = speed.begin(1000)
        clock.advance(0.05 * (count + 1) + 1e-4 * (4 * count + 1000))
        speed.end(mine, is_done=True)
        for other in others:
            speed.end(other, is_done=False)
    assert speed.seconds(1000) == pytest.approx(0.05 + 0.1)
    for _ in range(10):
        speed.begin(4)
    assert speed.seconds(2000) == pytest.approx(0.05 * 11 + 1e-4 * 2040)


def test_prompts_of_one_length_predict_others_in_proportion() -> None:
    clock = ManualClock()
    speed = Throughput(clock)
    for _ in range(4):
        work(speed, clock, 100, 0.1)
    assert speed.seconds(1000) == pytest.approx(1.0)
    speed.begin(900)
    assert speed.seconds(100) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_prompt_is_predicted_to_take_longer_than_by_the_mean_speed(seed: int) -> None:
    clock, chance = ManualClock(), random.Random(seed)
    speed = Throughput(clock)
    assert speed.seconds(100) is None
    for _ in range(chance.randint(4, 50)):
        work(speed, clock, chance.choice((1, 4, chance.randint(1, 5000))), chance.expovariate(2.0))
    assert speed.per_second is not None
    for tokens in (1, 100, 5000, 40_000, 10**6):
        assert 0.0 <= (speed.seconds(tokens) or 0.0) <= tokens / speed.per_second + 1e-9
