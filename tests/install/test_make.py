"""The Makefile, as far as it can be tried without installing anything."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(*words: str, folder: Path = ROOT) -> str:
    # Not as a part of the `make test` that may be running these tests.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


def test_make_alone_lists_every_task() -> None:
    tasks = {line.split()[1] for line in make().splitlines() if line.startswith("  make ")}
    assert tasks >= {"protos", "up", "down", "status", "logs", "doctor", "test", "check", "lint", "clean"}


def test_options_of_up_reach_the_command() -> None:
    shown = make("--dry-run", "up", "PREFILL=2", "DECODE=3", "ENGINE=simulated", "MODEL=x")
    assert "up --prefill 2 --decode 3 --engine simulated --model x" in shown


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("agg", "--encode 0 --prefill 0"), ("disagg", "--encode 0 --prefill 1"), ("epd", "--encode 1 --prefill 1")],
)
def test_a_mode_is_a_choice_of_workers(mode: str, expected: str) -> None:
    assert f"up {expected} --decode 1 " in make("--dry-run", "up", f"MODE={mode}")


def test_what_is_said_of_a_role_is_stronger_than_the_mode() -> None:
    assert "up --encode 0 --prefill 3 " in make("--dry-run", "up", "MODE=disagg", "PREFILL=3")


def test_another_mode_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        make("--dry-run", "up", "MODE=fast")
    assert "MODE=fast: there are agg, disagg and epd" in caught.value.stderr


def test_down_in_a_fresh_clone_does_nothing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "protos").mkdir()
    assert make("down", folder=tmp_path) == ""
