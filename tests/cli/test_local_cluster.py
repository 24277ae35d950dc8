"""`baton up` and its companions: real processes, with the simulated engine."""

import asyncio
import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from support.clients.baton_command import Baton
from support.clients.scraping import scrape
from support.cluster.command_fixtures import command_in
from support.eventually import eventually

from baton import AsyncClient
from baton.images import user_message
from baton.inference.v1 import generate_pb2
from cli.commands.generate import client_spans
from cli.local import lifecycle
from cli.local.state import ClusterState, StateFolder
from devtools.trace_viewer.contract import Verdict, verify
from devtools.trace_viewer.reading import ReadTrace, read
from runtime.aio import timeout

UP = ("up", "--engine", "simulated")
DEMO = Path(__file__).parents[2] / "models" / "demo"
GENERATE = "baton.inference.v1.InferenceService/Generate"
WORKERS = ("encode", "prefill", "decode")


@pytest.fixture
async def folder(tmp_path: Path, baton: Baton) -> AsyncIterator[StateFolder]:
    """The cluster's folder; whatever a test has started ends with it."""
    yield StateFolder(tmp_path / ".baton")
    await baton("down")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateFolder]:
    """The folder of a cluster for several tests, which `up` starts unless it runs."""
    folder = StateFolder(tmp_path_factory.mktemp("shared") / ".baton")
    yield folder
    asyncio.run(lifecycle.stop(folder))


@pytest.fixture
def shared_baton(shared: StateFolder, environment: dict[str, str]) -> Baton:
    """The command in the folder of the shared cluster."""
    return command_in(shared.path.parent, environment)


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


async def test_eight_simulated_workers_start_side_by_side(baton: Baton, folder: StateFolder) -> None:
    up = await baton(*UP, "--prefill", "4", "--decode", "4", "--openai", "0")
    assert up.code == 0
    [seconds] = re.findall(r"([0-9.]+) s  a first request was completed", up.out)
    started = [each.started_at for each in state_of(folder).processes if each.role in ("prefill", "decode")]
    assert len(started) == 8
    # One after another, the last would start when most of the time has passed, on any machine.
    assert max(started) - min(started) < 0.5 * float(seconds)


async def test_a_cluster_from_up_to_down(baton: Baton, folder: StateFolder) -> None:
    up = await baton(*UP)
    assert (up.code, up.err) == (0, "")
    assert "a first request was completed" in up.out
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
    names = ("etcd", "prefill-0", "decode-0", "router", "traces")
    assert [line.split()[:3:2] for line in status.lines[2 : 2 + len(names)]] == [[name, "running"] for name in names]
    assert status.lines[-1] == f"router serves OpenAI's API at http://{router.openai}/v1"
    assert "prefill-0  | " in (await baton("logs", "--lines", "5")).out

    assert (await baton("down")).code == 0
    assert none_alive(pids)
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "logs"]
    assert (await baton("status")).code == 1
    assert (await baton("down")).out == "nothing is running\n"


async def test_one_request_is_one_tree_of_spans_from_the_client_to_every_worker(
    baton: Baton, folder: StateFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster that `make up ENCODE=1` starts, read as Jaeger's API answers."""
    monkeypatch.chdir(tmp_path)
    assert (await baton("up", "--encode", "1", "--model", str(DEMO))).code == 0
    addresses = {each.role: each.address for each in state_of(folder).processes}
    content = user_message("What is in the picture?", [DEMO / "examples" / "circle-and-square.png"])
    request = generate_pb2.GenerateRequest(chat=generate_pb2.ChatInput(messages=[content]))
    request.routing.topology = generate_pb2.TOPOLOGY_DISAGGREGATED
    request.stopping.max_tokens = 4
    async with (
        client_spans(addresses["router"]) as provider,
        AsyncClient(addresses["router"], tracer_provider=provider) as client,
    ):
        assert await client.generate(request).text()

    def traces() -> list[ReadTrace]:
        with urllib.request.urlopen(f"http://{addresses['traces']}/api/traces?service=baton-cli") as answer:
            return [read(each) for each in json.load(answer)["data"]]

    await eventually(lambda: [verify(each) for each in traces()] == [Verdict("ok with encode", ())])
    (trace,) = traces()
    (client_span,) = [span for span in trace.spans if not span.parent_id]
    assert (client_span.service, client_span.name) == ("baton-cli", GENERATE)
    assert {span.service for span in trace.spans} == {f"baton-{each}" for each in ("cli", "router", *WORKERS)}
    for role, method in (("encode", "Encode"), ("prefill", "Prefill"), ("decode", "Decode")):
        ((service, name),) = [(span.service, span.name) for span in trace.named(f"{role.title()}Service/{method}")]
        assert (service, name) == (f"baton-{role}", f"baton.engine.v1.{role.title()}Service/{method}")
    (handoff,) = trace.named("handoff")
    assert handoff.attributes["baton.handoff.bytes"] > 0
    for span in trace.spans:
        assert span is client_span or trace.find(span.parent_id), f"{span.name} is in no tree"


# The next four leave a cluster that the one after them finds, all but the last.


async def test_a_supervisor_that_is_killed_leaves_no_process_and_hinders_no_next_one(
    shared_baton: Baton, shared: StateFolder
) -> None:
    assert (await shared_baton(*UP)).code == 0
    pids = pids_of(state_of(shared))
    os.kill(pids[0], signal.SIGKILL)
    await eventually(lambda: none_alive(pids))
    assert (await shared_baton(*UP)).code == 0


async def test_the_trace_of_a_request_is_where_up_says(shared_baton: Baton, shared: StateFolder) -> None:
    up = await shared_baton(*UP)
    assert (up.code, up.err) == (0, "")
    (address,) = [each.address for each in state_of(shared).processes if each.role == "traces"]
    assert f"http://{address}" in up.out

    def services() -> set[str]:
        with urllib.request.urlopen(f"http://{address}/api/services") as answer:
            return set(json.load(answer)["data"])

    await eventually(lambda: services() == {"baton-router", "baton-prefill", "baton-decode"})
    assert (await shared_baton("generate", "hello", "--max-tokens", "2")).code == 0
    await eventually(lambda: services() == {"baton-cli", "baton-router", "baton-prefill", "baton-decode"})


async def test_a_worker_that_is_killed_is_back_and_serves(shared_baton: Baton, shared: StateFolder) -> None:
    assert (await shared_baton(*UP)).code == 0
    before = {each.name: each for each in state_of(shared).processes}
    os.kill(before["decode-0"].pid, signal.SIGKILL)

    def is_back() -> bool:
        now = {each.name: each for each in state_of(shared).processes}["decode-0"]
        return now.restarts == 1 and now.pid not in (0, before["decode-0"].pid)

    await eventually(is_back)
    assert (await shared_baton(*UP)).code == 0  # waits until a request is answered


async def test_down_ends_a_cluster_whose_supervisor_hangs(
    shared_baton: Baton, shared: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await shared_baton(*UP)).code == 0
    pids = pids_of(state_of(shared))
    os.kill(pids[0], signal.SIGSTOP)
    monkeypatch.setattr(lifecycle, "STOP_SECONDS", 0.5)
    assert await lifecycle.stop(shared)
    assert none_alive(pids)


async def test_ctrl_c_during_start_up_ends_everything(tmp_path: Path, folder: StateFolder) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", *UP),
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
        *(sys.executable, "-m", "cli", *UP),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    await eventually(lambda: bool(processes_of(tmp_path)))
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 130
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("step", ["starting etcd", "processes are running", "router listens", "is ready"])
async def test_ctrl_c_at_each_step_ends_everything(step: str, tmp_path: Path, folder: StateFolder) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", *UP),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    async with timeout(90):
        while step.encode() not in await process.stdout.readline():
            pass
        pids = processes_of(tmp_path)
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 130
    assert none_alive(pids)
    assert processes_of(tmp_path) == []


# Ctrl-C while the command is being imported.
INTERRUPTED_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "cli.commands.up":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


async def test_ctrl_c_while_the_command_is_loaded_starts_nothing(
    baton: Baton, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_IMPORT)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    assert (await baton(*UP)).code == 130
    assert not (tmp_path / ".baton").exists()


# A supervisor that takes two seconds to end after it has given the folder back.
SLOW_EXIT = """
import atexit, sys, time
if "cli.local.supervisor" in sys.orig_argv:
    atexit.register(time.sleep, 2)
"""


async def test_down_returns_when_the_supervisor_is_gone_too(
    baton: Baton, environment: dict[str, str], tmp_path: Path, folder: StateFolder
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_EXIT)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    assert (await baton(*UP)).code == 0
    pids = pids_of(state_of(folder))
    assert (await baton("down")).code == 0
    assert none_alive(pids)


async def test_a_checkpoint_that_is_not_there_is_said_in_one_line(baton: Baton, tmp_path: Path) -> None:
    outcome = await baton("up", "--model", "missing")
    assert outcome.code == 2
    assert f"{tmp_path / 'missing'} is not a checkpoint" in outcome.err
    assert not (tmp_path / ".baton" / "state.json").exists()


async def test_a_worker_that_cannot_start_ends_the_start_with_its_log(baton: Baton, folder: StateFolder) -> None:
    broken = folder.path.parent / "tokenizer.json"
    broken.write_text("not JSON")
    outcome = await baton(*UP, "--model", str(broken.parent))
    assert outcome.code == 1
    assert "exited, with exit code" in outcome.err
    assert "okenizer" in outcome.err  # what the worker said itself
    assert not folder.has_supervisor
