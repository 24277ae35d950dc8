"""The Makefile, as far as it can be tried without installing anything."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(*words: str, folder: Path = ROOT) -> str:
    # Not as a part of the `make test` that may be running these tests.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "JOBS"))}
    done = subprocess.run(
        ["make", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


def test_make_alone_lists_every_task() -> None:
    tasks = {line.split()[1] for line in make().splitlines() if line.startswith("  make ")}
    assert tasks >= {"protos", "up", "down", "status", "logs", "doctor", "test", "check", "check-all", "lint", "clean"}


def test_options_of_up_reach_the_command() -> None:
    shown = make("--dry-run", "up", "PREFILL=2", "DECODE=3", "ENGINE=simulated", "MODEL=x")
    assert "up --prefill 2 --decode 3 --engine simulated --model x" in shown


def test_without_options_the_command_decides() -> None:
    assert "baton up --model models/demo\n" in make("--dry-run", "up")


def test_a_mode_reaches_the_command() -> None:
    assert "up --mode agg --prefill 3 --model models/demo\n" in make("--dry-run", "up", "MODE=agg", "PREFILL=3")


def test_engines_is_so_many_workers_of_whole_requests() -> None:
    for words in (["N=8", "ENGINE=mock"], ["N=8"]):
        assert "up --mode agg --decode 8 --engine simulated" in make("--dry-run", "engines", *words)
    assert "up --mode agg --decode 2 --engine vllm" in make("--dry-run", "engines", "N=2", "ENGINE=vllm")


def test_down_in_a_fresh_clone_does_nothing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "protos").mkdir()
    assert make("down", folder=tmp_path) == ""


def test_what_is_slow_runs_only_where_it_is_asked_for() -> None:
    assert "-m 'not slow and not requires_sglang and not requires_trtllm and not requires_vllm' tests --ignore" in make(
        "--dry-run", "test"
    )
    for words in (("test", "ALL=1"), ("test", "TESTS=tests/rpc")):
        assert "not slow" not in make("--dry-run", *words)


def test_a_sample_of_faults_runs_among_the_tests() -> None:
    shown = make("--dry-run", "test")
    assert "BATON_FAULTS=sample" in shown
    assert "--ignore tests/faults" not in shown
    assert "--ignore tests/faults" in make("--dry-run", "test", "ALL=1")
    assert "BATON_FAULTS" not in make("--dry-run", "test", "TESTS=tests/rpc")


def test_a_sample_of_faults_leaves_out_what_is_slow() -> None:
    assert "BATON_FAULTS=sample" in (sample := make("--dry-run", "faults", "SAMPLE=1"))
    assert "-m 'not slow" in sample
    assert "not slow" not in make("--dry-run", "faults")


def test_check_all_runs_everything_on_both_servers() -> None:
    shown = make("--dry-run", "check-all")
    for part in ("BATON_TEST_SERVER=grpcio", "BATON_TEST_SERVER=http2", "BATON_FAULTS=full", "BATON_FUZZ_INPUTS=10000"):
        assert part in shown
    assert "not slow" not in shown


def test_pytest_chooses_how_many_tests_run_at_once_unless_it_is_told() -> None:
    assert "-m pytest -n auto --dist worksteal" in make("--dry-run", "test")
    assert "-m pytest -n 5 --dist worksteal" in make("--dry-run", "test", "JOBS=5")
