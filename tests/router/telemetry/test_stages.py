"""The division of an attempt's time by a worker's report, and timings in a trailer."""

from google.protobuf.duration_pb2 import Duration

from baton.inference.v1 import timing_pb2
from baton.inference.v1.timing_pb2 import Stage as Number
from router.telemetry.stages import CallTiming, StageTiming, timings_message
from router.telemetry.timings import timings_trailer

QUEUE, PROMPT, STEPS = timing_pb2.STAGE_DECODE_QUEUE, timing_pb2.STAGE_PREFILL_COMPUTE, timing_pb2.STAGE_DECODE
ATTEMPTS = timing_pb2.STAGE_DECODE


def timing(stage: Number.ValueType, nanoseconds: int) -> timing_pb2.StageTiming:
    return timing_pb2.StageTiming(stage=stage, duration=Duration(nanos=nanoseconds))


def ended(
    attempt: CallTiming, *timings: timing_pb2.StageTiming, at: int, is_complete: bool = True
) -> list[tuple[Number.ValueType, int, int]]:
    attempt.report(timings)
    attempt.is_complete = is_complete
    return [(stage.stage, stage.nanoseconds, stage.before_first_token) for stage in attempt.end(at)]


def test_all_of_an_attempt_before_any_token_is_before_the_first() -> None:
    stages = ended(CallTiming(ATTEMPTS, "d1", 1000), timing(QUEUE, 200), timing(PROMPT, 300), at=1600)
    assert stages == [(QUEUE, 200, 200), (PROMPT, 300, 300)]


def test_a_worker_that_says_more_than_the_call_took_is_not_believed() -> None:
    stages = ended(CallTiming(ATTEMPTS, "d1", 1000), timing(QUEUE, 200), timing(PROMPT, 900), at=1600)
    assert stages == [(QUEUE, 200, 200), (PROMPT, 400, 400)]


def test_a_negative_time_is_none() -> None:
    message = timing_pb2.StageTiming(stage=QUEUE, duration=Duration(seconds=-5))
    assert ended(CallTiming(ATTEMPTS, "d1", 1000), message, at=1600) == [(QUEUE, 0, 0)]


def test_the_first_token_parts_an_attempt() -> None:
    attempt = CallTiming(ATTEMPTS, "d1", 1000)
    attempt.first_token_came(1550)
    stages = ended(attempt, timing(QUEUE, 200), timing(PROMPT, 300), timing(STEPS, 900), at=2500)
    assert stages == [(QUEUE, 200, 200), (PROMPT, 300, 300), (STEPS, 900, 0)]


def test_nothing_is_before_a_first_token_that_came_earlier() -> None:
    attempt = CallTiming(ATTEMPTS, "d1", 1000)
    attempt.first_token_came(900)
    assert ended(attempt, timing(QUEUE, 200), timing(STEPS, 300), at=1600) == [(QUEUE, 200, 0), (STEPS, 300, 0)]


def test_what_a_failed_attempt_leaves_open_is_its_own_stage() -> None:
    stages = ended(CallTiming(PROMPT, "p1", 1000), at=1600, is_complete=False)
    assert stages == [(PROMPT, 600, 600)]


def test_of_an_attempt_without_a_word_the_first_token_parts_the_prompt_from_the_steps() -> None:
    attempt = CallTiming(ATTEMPTS, "d1", 1000)
    attempt.first_token_came(1400)
    assert ended(attempt, at=1600, is_complete=False) == [(PROMPT, 400, 400), (STEPS, 200, 0)]


def many(count: int) -> tuple[StageTiming, ...]:
    """Timings of this many attempts; later ones took longer."""
    attempts = [StageTiming(PROMPT, 1000 * number, 10 * number, f"a-worker-{number}") for number in range(1, count + 1)]
    return (*attempts, StageTiming(timing_pb2.STAGE_UNATTRIBUTED, 7, 3))


def test_a_usual_timings_is_in_the_trailer_as_it_is() -> None:
    sent = timing_pb2.Timings.FromString(timings_trailer(many(8)))
    assert sent == timings_message(many(8))


def test_a_long_timings_keeps_its_sums_and_its_longest_stages_in_the_trailer() -> None:
    wire = timings_trailer(many(100))
    sent = timing_pb2.Timings.FromString(wire).stages
    assert len(wire) <= 640
    assert sum(each.duration.ToNanoseconds() for each in sent) == sum(stage.nanoseconds for stage in many(100))
    assert sum(each.before_first_token.ToNanoseconds() for each in sent) == sum(
        stage.before_first_token for stage in many(100)
    )
    assert [each.worker_id for each in sent][-2:] == ["a-worker-100", ""]
