"""How fast a worker computes, with a clock that the test sets."""

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
