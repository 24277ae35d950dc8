"""Processes of vLLM end with the process that started them, however that ended; without vLLM."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
from support.eventually import eventually

ROOT = Path(__file__).resolve().parents[4]
# A parent with a child of a child, as vLLM's worker is one. It says both ids; then it stays, or leaves when told to.
_PARENT = """
import subprocess, sys, time
from services.engines.vllm.orphans import OrphanWatch
inner = "import time; time.sleep(600)"
outer = f"import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {inner!r}]); "
outer += "print(child.pid, flush=True); time.sleep(600)"
with OrphanWatch() as watch:
    child = subprocess.Popen([sys.executable, "-c", outer])
    watch.started()
    print(child.pid, flush=True)
    if sys.argv[1] == "stay":
        time.sleep(600)
    sys.stdin.readline()
"""


def _parent(what: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _PARENT, what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _ids(parent: "subprocess.Popen[str]") -> list[int]:
    assert parent.stdout is not None
    return [int(parent.stdout.readline()) for _ in range(2)]


async def test_children_of_a_killed_process_are_killed() -> None:
    parent = _parent("stay")
    ids = _ids(parent)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    await eventually(lambda: not any(_runs(each) for each in ids))


async def test_children_that_an_orderly_end_has_left_are_killed() -> None:
    parent = _parent("leave")
    ids = _ids(parent)
    parent.communicate("leave\n")
    await eventually(lambda: not any(_runs(each) for each in ids))


async def test_processes_of_others_are_left_alone() -> None:
    first, second = _parent("stay"), _parent("stay")
    ids, others = _ids(first), _ids(second)
    first.send_signal(signal.SIGKILL)
    first.wait()
    await eventually(lambda: not any(_runs(each) for each in ids))
    assert all(_runs(each) for each in others)
    second.send_signal(signal.SIGKILL)
    second.wait()
    await eventually(lambda: not any(_runs(each) for each in others))


def _runs(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
