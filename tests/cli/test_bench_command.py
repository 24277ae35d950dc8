"""`baton bench` against a small cluster of the simulated engine."""

import importlib.util
import json
import os
import time
from pathlib import Path

import pytest
from support.clients.baton_command import Baton
from support.clients.scraping import since
from support.cluster.in_process import PATIENT, bench, simulated

from baton.errors import ConfigError
from baton.inference.v1 import cluster_service_pb2, generate_pb2, sampling_pb2
from cli.arguments import parse
from engine_protocol.timing_profile import read_timing_profile
from router.config import RoutingConfig
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine

STEP_SECONDS = 0.01


def workers(**engine: object) -> list[object]:
    costs: dict[str, object] = {"block_bytes": 64, "prefill_tokens_per_second": 20_000.0, "max_context_tokens": 20_000}
    return [
        simulated("p1", "prefill", **{**costs, **engine}),
        simulated("d1", "decode", **{**costs, "decode_step_seconds": STEP_SECONDS, **engine}),
    ]


async def test_a_sweep_measures_each_rate_and_concurrency(baton: Baton, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("markdown", "json")}
    async with bench(*workers(decode_step_seconds=3 * STEP_SECONDS), router=PATIENT) as running:
        outcome = await baton(
            *("bench", "sweep", "--address", running.address, "--rate", "20", "--concurrency", "1", "4"),
            *("--requests", "12", "--input", "400", "--output", "5:9", "--itl-target", "60000"),
            *(word for name, path in files.items() for word in (f"--{name}", str(path))),
        )
    assert outcome.code == 0
    assert files["markdown"].read_text() == outcome.out
    assert "Good answers: 60000 ms a token on average." in outcome.out
    written = json.loads(files["json"].read_text())
    assert [step["step"] for step in written["steps"]] == ["20/s", "1 at once", "4 at once"]
    for step in written["steps"]:
        assert (step["requests"], step["failed"], step["good_share"]) == (12, 0, 1.0)
        # No step finds the prompts of another one cached.
        assert step["hit_rate"] == 0.0
        # 400 tokens take 20 ms to compute, a decode step 30 ms. A busy machine adds to these, but where it delivers a
        # first token late, the gaps after it are shorter.
        assert step["first_token"]["p50"] >= 0.02
        assert step["whole"]["p50"] >= 0.02 + 4 * 3 * STEP_SECONDS
        assert 0 < 4 * step["token"]["p99"] <= step["whole"]["p99"] <= step["seconds"]
    alone, together = written["steps"][1:]
    # Requests that run on average, by Little's law; one after another, half of them take p50, and it is 2 at most.
    assert alone["requests_per_second"] * alone["whole"]["p50"] <= 2
    # It is no more than what the longest one makes of it.
    assert together["requests_per_second"] * together["whole"]["p99"] > 2


async def test_answers_that_miss_a_target_are_no_goodput(baton: Baton) -> None:
    async with bench(*workers(), router=PATIENT) as running:
        words = ("--concurrency", "1", "--requests", "3", "--input", "400", "--output", "2", "--ttft-target", "1")
        outcome = await baton("bench", "sweep", "--address", running.address, *words)
    assert outcome.code == 0
    assert outcome.lines[-1].split(" | ")[-4:-2] == ["0.00", "0%"]


async def test_a_replayed_trace_finds_its_prefixes_again(baton: Baton, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 200 * number, "input_length": 512 * 4, "output_length": 64, "hash_ids": [1, 2, 3, 10 + number]}
        for number in range(10)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cached, prompt = since("baton_prefix_cache_hit_tokens_total"), since("baton_worker_prompt_tokens_total")
    async with bench(*workers(), router=PATIENT) as running:
        outcome = await baton(
            *("bench", "replay", str(trace), "--address", running.address, "--block-tokens", "64"),
            *("--json", str(tmp_path / "json")),
        )
    assert outcome.code == 0
    (step,) = json.loads((tmp_path / "json").read_text())["steps"]
    assert (step["step"], step["requests"], step["failed"]) == ("trace.jsonl", 10, 0)
    # Three blocks of four for nine of ten requests, and less if some are sent before an earlier one has ended.
    assert 0 < step["hit_rate"] <= 0.75 * 0.9 + 0.01
    assert step["hit_rate"] == pytest.approx(cached.grown / prompt.grown)
    assert step["seconds"] >= 0.45


async def test_a_generated_trace_is_replayed_and_failures_are_counted(baton: Baton, tmp_path: Path) -> None:
    async with bench(*workers(max_context_tokens=300), router=PATIENT) as running:
        outcome = await baton(
            *("bench", "replay", "--generate", "agents", "--requests", "20", "--seconds", "1", "--speedup", "50"),
            *("--block-tokens", "16", "--address", running.address, "--json", str(tmp_path / "json")),
        )
    (step,) = json.loads((tmp_path / "json").read_text())["steps"]
    assert step["requests"] == 20
    assert 0 < step["failed"] < 20
    assert step["errors"] == {"InvalidRequest": step["failed"]}
    assert f"failed: {step['errors']}" in outcome.out
    assert outcome.code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep"], "give --rate, --concurrency or both"),
        (["replay"], "give either a TRACE or --generate"),
        (["replay", "missing.jsonl"], "missing.jsonl: cannot be read"),
    ],
    ids=["no-steps", "no-trace", "missing-trace"],
)
async def test_options_that_say_too_little_are_refused(baton: Baton, words: list[str], said: str) -> None:
    outcome = await baton("bench", *words, "--address", "127.0.0.1:1")
    assert outcome.code == 2
    assert said in outcome.err


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("sweep", ("--json", "{missing}/x.json")),
        ("sweep", ("--markdown", "{folder}")),
        ("sweep", ("--json", "")),
        ("sweep", ("--json", "{folder}/same", "--markdown", "{folder}/../{name}/same")),
        ("replay --generate agents", ("--json", "{missing}/x.json")),
        ("profile {missing}/profile.json", ()),
        ("profile {folder}/profile.json", ("--markdown", "{missing}/x.md")),
    ],
)
async def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(
    baton: Baton, tmp_path: Path, action: str, words: tuple[str, ...]
) -> None:
    places = {"folder": tmp_path, "missing": tmp_path / "missing", "name": tmp_path.name}
    line = [word.format(**places) for word in (*action.split(), *words)]
    rate = ("--rate", "1") if action == "sweep" else ()
    # No router is there: it would be the error of a command that had begun.
    outcome = await baton("bench", *line, *rate, "--address", "127.0.0.1:1")
    assert outcome.code == 2
    assert "cannot be written" in outcome.err or "is the file of --markdown too" in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


async def test_an_output_keeps_its_content_if_there_is_nothing_to_measure(baton: Baton, tmp_path: Path) -> None:
    (tmp_path / "json").write_text("before")
    words = ("replay", "missing.jsonl", "--json", str(tmp_path / "json"))
    outcome = await baton("bench", *words, "--address", "127.0.0.1:1")
    assert outcome.code == 2
    assert (tmp_path / "json").read_text() == "before"


@pytest.mark.parametrize(
    "words",
    [
        *(("--rate", text) for text in ("inf", "nan", "-1", "0", "1e999", "1e300", "1e-300", "x")),
        *(("--rate", "1", option, text) for option in ("--ttft-target", "--itl-target") for text in ("inf", "nan")),
        ("--rate", "1", "--timeout", "inf"),
        ("--rate", "1", "--timeout", "1e300"),
        ("--concurrency", "0"),
        ("--rate", "1", "--input", "1:99999999999"),
        ("--rate", "1", "--input", "9" * 5000),
    ],
)
def test_numbers_that_are_no_settings_are_refused_where_they_are_parsed(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(["bench", "sweep", *words, "--address", "127.0.0.1:1"])
    assert refused.value.code == 2
    assert f"error: argument {[word for word in words if word.startswith('--')][-1]}" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
async def test_a_plot_without_matplotlib_says_what_to_install(baton: Baton) -> None:
    outcome = await baton("bench", "sweep", "--rate", "1", "--plot", "x.png", "--address", "127.0.0.1:1")
    assert outcome.code == 2
    assert "pip install 'baton-serving[bench]'" in outcome.err


async def test_a_profile_gives_a_simulated_engine_and_a_router_the_speed_of_the_measured_one(
    baton: Baton, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    words = ("--prompts", "200", "2000", "--batches", "1", "3", "--contexts", "100", "--answer", "10", "--repeats", "3")
    costs: dict[str, object] = {"prefill_tokens_per_second": 5_000.0, "decode_step_seconds": 0.05}
    async with bench(*workers(**costs), router=PATIENT) as running:
        outcome = await baton("bench", "profile", str(path), "--address", running.address, *words)
    assert outcome.code == 0
    profile = read_timing_profile(path)
    # 2,000 tokens take 0.4 s, and one more takes 0.05 s whatever the batch; the machine adds to it.
    assert [point.tokens for point in profile.prefill] == [200, 2000]
    assert profile.prefill_seconds(0, 2000) >= 0.9 * 0.4
    assert [(point.batch, point.context) for point in profile.decode] == [(1, 100), (3, 100)]
    # A first token that is delivered late shortens the gaps after it.
    assert all(point.seconds >= 0.1 * 0.05 for point in profile.decode)
    # A cluster that is simulated by it is as slow, and its router knows that before the first request.
    timing = {"prefill_tokens_per_second": 0.0, "decode_step_seconds": 0.0, "timing": {"profile": str(path)}}
    router = PATIENT.model_copy(update={"routing": RoutingConfig(policy="predicted_seconds", profile=str(path))})
    async with bench(*workers(**timing), router=router) as running:
        ids = generate_pb2.TokenIds(ids=[40 + index % 80 for index in range(2000)])
        request = cluster_service_pb2.ExplainRouteRequest(request=generate_pb2.GenerateRequest(token_ids=ids))
        explained = await running.operators.ExplainRoute(request)
        line = profile.prefill_base_seconds + 2000 * profile.prefill_token_seconds
        assert explained.candidates[0].prefill_seconds == pytest.approx(line)
        started = time.monotonic()
        await running.generate(token_ids=ids, stopping=sampling_pb2.StoppingOptions(max_tokens=5, ignore_eos=True))
        step = min(point.seconds for point in profile.decode)
        assert time.monotonic() - started >= 0.9 * (profile.prefill_seconds(0, 2000) + 4 * step)


@pytest.mark.parametrize("extra", [{}, {"prefill_tokens_per_second": 0.0, "decode_step_seconds": 0.0}])
async def test_a_simulated_engine_refuses_a_profile_that_is_missing_or_beside_other_costs(
    extra: dict[str, object], tmp_path: Path
) -> None:
    costs = {"prefill_tokens_per_second": 100.0, **extra, "timing": {"profile": str(tmp_path / "none.json")}}
    with pytest.raises((ValueError, ConfigError), match=r"timing takes the place|none\.json"):
        async with SimulatedEngine(SimulatedConfig.model_validate(costs)):
            pass
