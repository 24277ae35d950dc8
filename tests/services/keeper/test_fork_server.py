"""The fork server: processes that have imported their code already follow a worker that is lost."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.keeper import SECONDS, Run, keeper
from support.readable import is_readable

from services.keeper.fork_server import NAME


def servers_of(run: Run) -> list[psutil.Process]:
    return [each for each in psutil.Process(run.popen.pid).children() if each.name() == NAME]


def is_forked(run: Run, start: int) -> bool:
    return f"{start} forked" in run.notes


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_worker_that_is_killed_is_followed_by_a_process_that_is_forked(tmp_path: Path, name: str) -> None:
    first = f"imports+put:kv:one+watch:600+beat:2+die:{name}"
    with keeper(tmp_path, first, f"get:kv:one+watch:600+beat:2+die:{name}", "get:kv:one+exit:3", "exit:0") as run:
        assert run.ended() == 0
    assert f"1 started by {name}" in run.notes
    assert "1 found kv ['kv of one'] stale ''" in run.notes
    assert is_forked(run, 1)
    assert is_forked(run, 2)


def test_a_forked_process_is_a_child_of_the_keeper_and_of_a_session_of_its_own(tmp_path: Path) -> None:
    with keeper(tmp_path, "imports+watch:600+beat:2+die:SIGKILL", "exit:0") as run:
        pid = run.pid(1)
        assert run.ended() == 0
    [said] = re.findall(r"1 forked, (.*)", run.notes)
    assert said.startswith(f"parent {run.popen.pid}, session {pid}, name python")


def test_a_forked_process_inherits_no_descriptor_of_a_keeper(tmp_path: Path) -> None:
    with keeper(tmp_path, "imports+watch:600+beat:2+die:SIGKILL", "open+exit:0") as run:
        assert run.ended() == 0
    [sockets] = re.findall("1 has (.*) sockets", run.notes)
    assert int(sockets) == 2  # its own conversation's, twice


def test_the_exit_code_of_a_forked_process_is_the_keepers(tmp_path: Path) -> None:
    with keeper(tmp_path, "imports+watch:600+beat:2+die:SIGKILL", "exit:2") as run:
        assert run.ended() == 2
    assert is_forked(run, 1)


def test_nothing_is_left_when_the_keeper_ends(tmp_path: Path) -> None:
    with keeper(tmp_path, "imports+watch:600+hold+held+exit:0") as run:
        run.pid(0)
        run.until(lambda _: bool(servers_of(run)))
        descriptor = os.pidfd_open(servers_of(run)[0].pid)
        run.popen.terminate()
        assert run.ended() == 0
    assert is_readable(descriptor, SECONDS)


def test_a_keeper_that_is_killed_takes_the_forked_process_and_the_server_with_it(tmp_path: Path) -> None:
    with keeper(tmp_path, "imports+watch:600+beat:2+die:SIGKILL", "wait") as run:
        descriptors = [os.pidfd_open(run.pid(1)), *(os.pidfd_open(each.pid) for each in servers_of(run))]
        assert len(descriptors) == 2
        run.popen.kill()
        for descriptor in descriptors:
            assert is_readable(descriptor, SECONDS)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_server_that_is_lost_or_hangs_is_replaced_by_a_start(tmp_path: Path, name: str) -> None:
    with keeper(tmp_path, "imports+watch:600+wait", "watch:600+exit:0") as run:
        first = run.pid(0)
        run.until(lambda _: bool(servers_of(run)))
        [server] = servers_of(run)
        server.send_signal(signal.Signals[name])
        os.kill(first, signal.SIGKILL)
        assert run.ended() == 0
        with suppress(psutil.NoSuchProcess):
            server.kill()
    assert "1 started by SIGKILL" in run.notes
    assert not is_forked(run, 1)


def test_a_process_that_a_hanging_server_forks_too_late_takes_no_part(tmp_path: Path) -> None:
    with keeper(tmp_path, "imports+put:kv:one+watch:600+wait", "get:kv:one+watch:600+wait") as run:
        first = run.pid(0)
        run.until(lambda _: bool(servers_of(run)))
        [server] = servers_of(run)
        server.suspend()
        os.kill(first, signal.SIGKILL)
        second = run.pid(1)
        descriptor = os.pidfd_open(server.pid)
        server.resume()
        assert is_readable(descriptor, SECONDS)
        run.until(lambda _: _workers(run) == {second})
        run.popen.terminate()
        run.ended()
    assert not is_forked(run, 1)
    assert run.notes.count("1 found kv ['kv of one'] stale ''") == 1


def _workers(run: Run) -> set[int]:
    children = psutil.Process(run.popen.pid).children()
    return {each.pid for each in children if each.status() != psutil.STATUS_ZOMBIE and each.name() != NAME}


def test_a_process_that_fails_before_it_is_ready_is_not_followed_by_a_forked_one(tmp_path: Path) -> None:
    lives = "watch:600+beat:2+die:SIGKILL"
    with keeper(tmp_path, f"imports+{lives}", "exit:1", lives, "exit:0") as run:
        assert run.ended() == 0
    # The process of the third start leaves a server of its own.
    assert [is_forked(run, start) for start in range(4)] == [False, True, False, True]


def test_a_process_that_is_killed_before_it_is_ready_is_followed_by_a_forked_one(tmp_path: Path) -> None:
    with keeper(tmp_path, "imports+watch:600+beat:2+die:SIGKILL", "die:SIGKILL", "exit:0") as run:
        assert run.ended() == 0
    assert [is_forked(run, start) for start in range(3)] == [False, True, True]


def test_an_upgrade_is_a_start_whose_server_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    first = "imports+put:kv:one+watch:600+upgrade+die:SIGKILL"
    with keeper(tmp_path, first, "get:kv:one+watch:600+beat:2+die:SIGKILL", "beat:1+exit:0") as run:
        assert run.ended() == 0
    assert [is_forked(run, start) for start in range(3)] == [False, False, True]


def test_a_process_that_stands_by_is_forked(tmp_path: Path) -> None:
    first = "imports+put:kv:one+put:weights:two+watch:600+stand_by+until:1 found weights+die:SIGKILL"
    with keeper(tmp_path, first, "get:weights:two+get:kv:one+exit:0") as run:
        assert run.ended() == 0
    assert "1 found kv ['kv of one'] stale ''" in run.notes
    assert is_forked(run, 1)


def test_servers_that_have_ended_leave_no_zombies(tmp_path: Path) -> None:
    first = "imports+put:kv:one+watch:600+upgrade+die:SIGKILL"
    with keeper(tmp_path, first, "get:kv:one+watch:600+beat:2+die:SIGKILL", "watch:600+wait") as run:
        run.pid(2)
        children = psutil.Process(run.popen.pid).children()
        assert [each for each in children if each.status() == psutil.STATUS_ZOMBIE] == []
        run.popen.terminate()
        run.ended()


def test_a_process_with_threads_leaves_no_server(tmp_path: Path) -> None:
    with keeper(tmp_path, "imports_with_threads+watch:600+beat:2+die:SIGKILL", "exit:0") as run:
        assert run.ended() == 0
    assert not is_forked(run, 1)
