"""`baton up` and its companions: real processes, with the simulated engine."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from support.baton_command import Baton
from support.scraping import scrape
from support.worker_views import eventually

from client.local.state import ClusterState, StateFolder

UP = ("up", "--engine", "simulated")


@pytest.fixture
async def folder(tmp_path: Path, baton: Baton) -> AsyncIterator[StateFolder]:
    """The cluster's folder; whatever a test has started ends with it."""
    yield StateFolder(tmp_path / ".baton")
    await baton("down")


def state_of(folder: StateFolder) -> ClusterState:
    state = folder.read()
    assert state is not None
    return state


def pids_of(state: ClusterState) -> list[int]:
    return [state.supervisor_pid, *(each.pid for each in state.processes)]


def processes_of(folder: Path) -> list[int]:
    """Every process that was started with something of this folder on its command line."""
    found = psutil.process_iter(["cmdline"])
    return [each.pid for each in found if any(str(folder) in word for word in each.info["cmdline"] or [])]


def none_alive(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


async def test_a_cluster_from_up_to_down(baton: Baton, folder: StateFolder) -> None:
    up = await baton(*UP)
    assert (up.code, up.err) == (0, "")
    assert "a first request was answered" in up.out
    pids = pids_of(state_of(folder))

    assert (await baton("generate", "hello", "--max-tokens", "2")).code == 0
    again = await baton(*UP)
    assert (again.code, again.lines[0].startswith("already running")) == (0, True)
    assert pids_of(state_of(folder)) == pids
    other = await baton("up", "--engine", "simulated", "--decode", "2")
    assert (other.code, "baton down" in other.out) == (1, True)

    router = next(each for each in state_of(folder).processes if each.role == "router")
    assert scrape(router.metrics).sum("baton_router_requests_total", outcome="ok") >= 2
    status = await baton("status")
    assert status.code == 0
    assert router.metrics in status.out
    assert [line.split()[:3:2] for line in status.lines[2:]] == [
        [name, "running"] for name in ("etcd", "prefill-0", "decode-0", "router", "traces")
    ]
    assert "prefill-0  | " in (await baton("logs", "--lines", "5")).out

    assert (await baton("down")).code == 0
    assert none_alive(pids)
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "logs"]
    assert (await baton("status")).code == 1
    assert (await baton("down")).out == "nothing is running\n"


async def test_the_trace_of_a_request_is_where_up_says(baton: Baton, folder: StateFolder) -> None:
    up = await baton(*UP)
    (address,) = [each.address for each in state_of(folder).processes if each.role == "traces"]
    assert f"http://{address}" in up.out

    def services() -> set[str]:
        with urllib.request.urlopen(f"http://{address}/api/services") as answer:
            return set(json.load(answer)["data"])

    await eventually(lambda: services() == {"baton-router", "baton-prefill", "baton-decode"})


async def test_a_worker_that_is_killed_is_back_and_serves(baton: Baton, folder: StateFolder) -> None:
    assert (await baton(*UP)).code == 0
    before = {each.name: each for each in state_of(folder).processes}
    os.kill(before["decode-0"].pid, signal.SIGKILL)

    def is_back() -> bool:
        now = {each.name: each for each in state_of(folder).processes}["decode-0"]
        return now.restarts == 1 and now.pid not in (0, before["decode-0"].pid)

    await eventually(is_back)
    assert (await baton(*UP)).code == 0  # waits until a request is answered


async def test_a_supervisor_that_is_killed_leaves_no_process_and_hinders_no_next_one(
    baton: Baton, folder: StateFolder
) -> None:
    assert (await baton(*UP)).code == 0
    pids = pids_of(state_of(folder))
    os.kill(pids[0], signal.SIGKILL)
    await eventually(lambda: none_alive(pids))
    assert (await baton(*UP)).code == 0


async def test_ctrl_c_during_start_up_ends_everything(tmp_path: Path, folder: StateFolder) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "client", *UP),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    await eventually(lambda: (state := folder.read()) is not None and all(each.pid for each in state.processes))
    pids = pids_of(state_of(folder))
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 130
    assert none_alive(pids)
    assert not folder.has_supervisor


async def test_ctrl_c_before_the_supervisor_has_the_folder_ends_it_too(tmp_path: Path, folder: StateFolder) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "client", *UP),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    await eventually(lambda: bool(processes_of(tmp_path)))
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 130
    assert processes_of(tmp_path) == []


async def test_a_checkpoint_that_is_not_there_is_said_in_one_line(baton: Baton, tmp_path: Path) -> None:
    outcome = await baton("up", "--model", "missing")
    assert outcome.code == 2
    assert f"{tmp_path / 'missing'} is no checkpoint" in outcome.err
    assert not (tmp_path / ".baton" / "state.json").exists()


async def test_a_worker_that_cannot_start_ends_the_start_with_its_log(baton: Baton, folder: StateFolder) -> None:
    broken = folder.path.parent / "tokenizer.json"
    broken.write_text("not JSON")
    outcome = await baton(*UP, "--model", str(broken.parent))
    assert outcome.code == 1
    assert "has ended, with exit code" in outcome.err
    assert "okenizer" in outcome.err  # what the worker said itself
    assert not folder.has_supervisor
