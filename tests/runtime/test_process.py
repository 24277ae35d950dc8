"""A process from its start to its exit code, as its supervisor sees it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.event_loops import LOOPS, choose_loop

PROGRAM = """
import asyncio, gc, sys
from runtime.aio import TaskGroup
from baton.errors import ConfigError
from runtime.process import run
from runtime.telemetry.logs import configure_logging

async def ends(stopping):
    print("loop:", type(asyncio.get_running_loop()).__module__.split(".")[0], flush=True)

async def waits(stopping):
    print("ready", flush=True)
    await stopping.wait()
    print("stopping", flush=True)

async def hangs(stopping):
    print("ready", flush=True)
    await stopping.wait()
    print("stopping", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

async def misconfigured(stopping):
    raise ConfigError("router.yaml: retry.budgett: unknown key")

async def misconfigured_inside(stopping):
    async with TaskGroup() as tasks:
        tasks.create_task(misconfigured(stopping))

async def counts_frozen(stopping):
    print("frozen:", gc.get_freeze_count() > 10_000, flush=True)

async def counts_collections(stopping):
    before = gc.get_stats()[0]["collections"]
    living = [[] for _ in range(4_000)]
    print("collections:", gc.get_stats()[0]["collections"] - before, flush=True)

async def fails(stopping):
    configure_logging("json", "info")
    raise RuntimeError("broken")

run(globals()[sys.argv[1]])
print("returned")
"""


@pytest.fixture(autouse=True, params=LOOPS)
def loop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The loop of the processes, each of two in turn."""
    choose_loop(request.param, tmp_path, monkeypatch)
    return str(request.param)


@contextmanager
def program(main: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-c", PROGRAM, main]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def outcome(main: str) -> tuple[int, str, str]:
    with program(main) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


def test_a_main_that_ends_well_returns(loop: str) -> None:
    assert outcome("ends") == (0, f"loop: {loop}\nreturned\n", "")


def test_full_garbage_collections_look_at_nothing_that_was_imported() -> None:
    assert outcome("counts_frozen") == (0, "frozen: True\nreturned\n", "")


def test_the_objects_of_a_burst_of_requests_begin_no_collection() -> None:
    assert outcome("counts_collections") == (0, "collections: 0\nreturned\n", "")


def test_a_config_error_is_one_line_and_exit_code_2() -> None:
    assert outcome("misconfigured") == (2, "", "router.yaml: retry.budgett: unknown key\n")


def test_a_config_error_inside_a_task_group_is_one_line_too() -> None:
    assert outcome("misconfigured_inside") == (2, "", "router.yaml: retry.budgett: unknown key\n")


def test_any_other_error_is_logged_and_exit_code_1() -> None:
    code, _, err = outcome("fails")
    assert code == 1
    assert "process failed" in err
    assert "RuntimeError: broken" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_main_end_in_its_own_time(number: signal.Signals) -> None:
    with program("waits") as process:
        assert line(process) == "ready"
        process.send_signal(number)
        assert line(process) == "stopping"
        assert line(process) == "returned"
        assert process.wait(10) == 0


def test_a_second_signal_cancels_main() -> None:
    with program("hangs") as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "stopping"
        process.send_signal(signal.SIGINT)
        assert line(process) == "cleaned up"
        assert process.wait(10) == 128 + signal.SIGINT
