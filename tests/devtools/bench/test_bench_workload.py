"""The requests of `baton bench`: traces, lengths and times."""

import gzip
import io
import itertools
import json
import statistics
from pathlib import Path

import pytest
from PIL import Image

from baton.errors import ConfigError
from cli.arguments.benchmarks import TRACES
from devtools.bench.traces import BLOCK_TOKENS, KINDS, generate_trace, ideal_hit_rate, read_trace
from devtools.bench.workload import Images, Lengths, Workload, of_trace, read_lengths

LINE = {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", {**LINE, "timestamp": 28482}, LINE)
    assert [request.at_seconds for request in read_trace(path)] == [0.0, 1.0]
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(packed) == read_trace(path)


AGENT = {**LINE, "session_id": "a"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hash_ids": None}, "is not a request in Mooncake's format: hash_ids: "),
        ({"hash_ids": "46"}, "is not a request in Mooncake's format: hash_ids: "),
        ({"hash_ids": [46.5, 47]}, "is not a request in Mooncake's format: hash_ids: "),
        ({"hash_ids": [-1, 47]}, "is not a request in Mooncake's format: hash_ids: "),
        ({"hash_ids": [1 << 64, 47]}, "is not a request in Mooncake's format: hash_ids: "),
        ({"hash_ids": [46, 46]}, "has one of its hash_ids twice"),
        ({"timestamp": "soon"}, "is not a request in Mooncake's format: timestamp: "),
        ({"timestamp": float("nan")}, "is not a request in Mooncake's format: timestamp: "),
        ({"timestamp": -1}, "is not a request in Mooncake's format: timestamp: "),
        ({"output_length": -1}, "is not a request in Mooncake's format: output_length: "),
        ({"input_length": 5000}, "input_length 5000 does not fit 2 hash_ids"),
        ({"input_length": 0, "hash_ids": []}, "input_length 0 does not fit 0 hash_ids"),
        ({"timestamp": None}, "expected either a timestamp or a delay"),
        ({"delay": 5}, "expected either a timestamp or a delay"),
        ({"timestamp": None, "delay": 5}, "has a delay, but no line of its session_id comes before it"),
        ({"session_id": "a", "timestamp": 1}, "comes before the line before it of session 'a'"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = write(tmp_path / "trace.jsonl", AGENT, {**LINE, **change})
    with pytest.raises(ConfigError, match=rf"trace.jsonl:2: {said}"):
        read_trace(path)


@pytest.mark.parametrize("line", ["[1, 2]", "{", "[" * 100_000, "\x00", '"' + "x" * 1000])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "trace.jsonl", LINE)
    path.write_text(path.read_text() + line)
    with pytest.raises(ConfigError, match=r"trace.jsonl:2: is not a request in Mooncake's format"):
        read_trace(path)


def test_the_next_turn_of_a_session_may_come_so_long_after_the_answer(tmp_path: Path) -> None:
    turn = {**AGENT, "timestamp": None, "delay": 500, "output_length": 100}
    path = write(tmp_path / "trace.jsonl", {**AGENT, "output_length": 50}, turn, {**turn, "ends_session": True})
    requests = read_trace(path)
    assert [request.at_seconds for request in requests] == [0.0, 50 * 0.02 + 0.5, 150 * 0.02 + 1.0]
    assert [request.delay_seconds for request in requests] == [None, 0.5, 0.5]
    with pytest.raises(ConfigError, match=r"trace.jsonl:4: follows the line that ends session 'a'"):
        read_trace(write(path, AGENT, AGENT, {**AGENT, "ends_session": True}, turn))


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.gz").write_bytes(b"no gzip")
    for name in ("missing.jsonl", "broken.gz"):
        with pytest.raises(ConfigError, match=f"{name}: cannot be read"):
            read_trace(tmp_path / name)


def test_the_command_line_offers_all_kinds_of_traces() -> None:
    assert (*KINDS, "sessions") == TRACES


@pytest.mark.parametrize("kind", KINDS)
def test_generated_traces_share_prefixes_and_are_the_same_for_one_seed(kind: str) -> None:
    trace = generate_trace(1, 300, 60.0, kind)
    assert len(trace) == 300
    assert trace == generate_trace(1, 300, 60.0, kind)
    assert trace != generate_trace(2, 300, 60.0, kind)
    assert 0.2 < ideal_hit_rate(trace) < 1.0
    assert all((len(each.hash_ids) - 1) * BLOCK_TOKENS < each.input_tokens for each in trace)


def test_prompts_of_a_trace_are_equal_where_its_blocks_are(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", LINE, {**LINE, "hash_ids": [46, 48], "timestamp": 28482})
    first, second = of_trace(read_trace(path), speedup=4.0, block_tokens=16, most_output=100)
    assert second.at_seconds == 0.25
    assert len(first.token_ids) == 16 + 88 * 16 // 512
    assert first.token_ids[:16] == second.token_ids[:16]
    assert first.token_ids != second.token_ids


def test_requests_arrive_at_random_with_the_rate_that_was_asked_for() -> None:
    planned = Workload(Lengths(prompt=(10, 20), answer=(3, 3))).at_rate(50.0, 2000, seed=1)
    gaps = [later.at_seconds - each.at_seconds for each, later in itertools.pairwise(planned)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.15)
    assert {len(each.token_ids) for each in planned} == set(range(10, 21))


def test_lengths_come_from_a_file_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("100 20\n\n300, 5\n")
    assert read_lengths(path) == ((100, 20), (300, 5))
    path.write_text("100 20\n300\n")
    with pytest.raises(ConfigError, match="lengths:2: expected the lengths"):
        read_lengths(path)


def test_servers_that_are_compared_get_equal_lengths_and_other_contents() -> None:
    lengths = Lengths(prompt=(10, 20), answer=(1, 9))
    one, other = (Workload(lengths, Images(1, (8, 30)), prompts).all_at_once(20, seed=3) for prompts in (1, 2))
    assert [(len(each.token_ids), each.output_tokens) for each in one] == [
        (len(each.token_ids), each.output_tokens) for each in other
    ]
    assert not {each.token_ids for each in one} & {each.token_ids for each in other}
    assert not {each.images for each in one} & {each.images for each in other}
    assert one == Workload(lengths, Images(1, (8, 30)), 1).all_at_once(20, seed=3)


def test_images_have_their_sizes_and_repeat_as_often_as_was_asked_for() -> None:
    workload = Workload(Lengths(prompt=(5, 5)), Images(2, (10, 40), 0.75))
    planned = workload.all_at_once(100, seed=1)
    images = [image for each in planned for image in each.images]
    assert [len(each.images) for each in planned] == [2] * 100
    assert len(set(images)) == pytest.approx(50, abs=15)
    sizes = {Image.open(io.BytesIO(image)).size for image in images}
    assert all(width == height and 10 <= width <= 40 for width, height in sizes)
    assert len(sizes) > 10
