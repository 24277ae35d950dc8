"""The file with the measured speed of a model."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError
from engine_protocol.timing_profile import DecodePoint, PrefillPoint, TimingProfile, read_timing_profile

PROFILE = TimingProfile(
    "m",
    (PrefillPoint(100, 0.03), PrefillPoint(1000, 0.12), PrefillPoint(2000, 0.32)),
    (DecodePoint(1, 500, 0.01), DecodePoint(1, 1500, 0.02), DecodePoint(9, 500, 0.018), DecodePoint(9, 1500, 0.036)),
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json())
    assert read_timing_profile(path) == PROFILE


@pytest.mark.parametrize(
    ("start", "count", "seconds"),
    [(0, 100, 0.03), (0, 550, 0.075), (0, 50, 0.025), (1000, 500, 0.10), (0, 3000, 0.52), (700, 0, 0.0)],
)
def test_a_part_of_a_prompt_takes_what_the_whole_takes_longer(start: int, count: int, seconds: float) -> None:
    assert PROFILE.prefill_seconds(start, count) == pytest.approx(seconds)


def test_a_prompt_in_pieces_takes_as_long_as_at_once() -> None:
    pieces = sum(PROFILE.prefill_seconds(start, 100) for start in range(0, 2000, 100))
    assert pieces == pytest.approx(PROFILE.prefill_seconds(0, 2000))


@pytest.mark.parametrize(("batch", "context", "seconds"), [(1, 1000, 0.015), (5, 500, 0.014), (5, 1000, 0.021)])
def test_a_token_takes_what_lies_between_the_measured_batches_and_contexts(
    batch: int, context: int, seconds: float
) -> None:
    assert PROFILE.decode_seconds(batch, context) == pytest.approx(seconds)


def test_a_step_gets_slower_by_what_each_further_sequence_adds() -> None:
    assert PROFILE.stream_seconds == pytest.approx(0.001)


def test_the_base_of_prompts_is_where_the_line_through_all_of_them_begins() -> None:
    # The shortest one was measured too slow: the line through the two shortest begins at 0.021.
    points = ((128, 0.020), (512, 0.018), (1024, 0.030), (2048, 0.056), (4000, 0.112))
    profile = replace(PROFILE, prefill=tuple(PrefillPoint(*point) for point in points))
    assert 0.005 < profile.prefill_base_seconds < 0.012
    assert profile.prefill_base_seconds + 1024 * profile.prefill_token_seconds == pytest.approx(0.030, rel=0.2)
    one = replace(PROFILE, prefill=(PrefillPoint(100, 0.03),))
    assert one.prefill_base_seconds + 100 * one.prefill_token_seconds == pytest.approx(0.03)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"version": 2}',
        '{"version": 1, "model": "m", "prefill": [], "decode": []}',
        PROFILE.to_json().replace("0.03,", "-1,").replace("0.03\n", "-1\n"),
        PROFILE.to_json().replace("0.03", "Infinity"),
        PROFILE.to_json().replace("100,", "0,"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_its_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"profile\.json"):
        read_timing_profile(path)
