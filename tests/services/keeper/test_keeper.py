"""The keeper, with programs in the worker's place: what it keeps, when it starts them again, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cluster.processes import ROOT
from support.keeper import SECONDS, keeper
from support.readable import is_readable

from services.keeper import client
from services.keeper.messages import Answer, KeeperLost, pair, send


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_worker_that_is_killed_is_started_again_and_finds_what_was_kept(tmp_path: Path, name: str) -> None:
    with keeper(tmp_path, f"put:kv:one+put:weights:two+die:{name}", "get:kv:one+get:weights:two+exit:0") as run:
        assert run.ended() == 0
        assert f"1 started by {name}" in run.notes
        assert "1 found kv ['kv of one'] stale ''" in run.notes
        assert "1 found weights ['weights of two'] stale ''" in run.notes


def test_a_signal_without_a_name_is_a_death_like_others(tmp_path: Path) -> None:
    with keeper(tmp_path, f"die:{signal.SIGRTMIN + 6}", "exit:0") as run:
        assert run.ended() == 0
        assert f"1 started by signal {signal.SIGRTMIN + 6}" in run.notes


def test_memory_with_another_fingerprint_is_freed_and_said(tmp_path: Path) -> None:
    with keeper(tmp_path, "put:kv:one+die:SIGKILL", "get:kv:other+get:kv:one+exit:0") as run:
        assert run.ended() == 0
        assert "1 found kv [] stale 'one'" in run.notes
        assert "1 found kv [] stale ''" in run.notes


def test_memory_is_freed_when_told_and_replaced_by_later_memory(tmp_path: Path) -> None:
    with keeper(tmp_path, "put:a:1+put:b:1+put:b:2+drop:a+die:SIGKILL", "get:a:1+get:b:2+exit:0") as run:
        assert run.ended() == 0
        assert "1 found a [] stale ''" in run.notes
        assert "1 found b ['b of 2'] stale ''" in run.notes


def test_a_worker_that_gives_no_sign_of_life_is_killed_and_started_again(tmp_path: Path) -> None:
    with keeper(tmp_path, "put:kv:one+watch:0.3+beat:3+wait", "get:kv:one+exit:0") as run:
        assert run.ended() == 0
        assert "1 started by hang" in run.notes
        assert "1 found kv ['kv of one']" in run.notes


def test_a_stopped_worker_dies_before_another_one_starts(tmp_path: Path) -> None:
    with keeper(tmp_path, "watch:0.5+beat:1+started+beat:600", "exit:0") as run:
        first = run.pid(0)
        run.until(lambda notes: "started again" in notes)  # before it is watched it may take long to start
        os.kill(first, signal.SIGSTOP)
        assert run.ended() == 0
        assert "1 started by hang" in run.notes
        with pytest.raises(ProcessLookupError):
            os.kill(first, signal.SIGCONT)


def test_a_worker_that_beats_is_not_killed(tmp_path: Path) -> None:
    with keeper(tmp_path, "watch:2+beat:40+exit:0") as run:
        assert run.ended() == 0
        assert run.notes.count("started") == 1


def test_a_worker_that_gets_no_processor_is_not_killed(tmp_path: Path) -> None:
    with keeper(tmp_path, "watch:1.4+starve:8+exit:0") as run:
        assert run.ended() == 0
        assert run.notes.count("started") == 1
    [late] = re.findall("beat after (.*) at the latest", run.notes)
    assert float(late) > 1.5, "the machine was too fast to starve anybody"


def test_a_worker_that_computes_without_an_end_is_killed(tmp_path: Path) -> None:
    with keeper(tmp_path, "watch:0.5+spin", "exit:0") as run:
        assert run.ended() == 0
        assert "1 started by hang" in run.notes


def test_sigterm_is_passed_on_and_the_keeper_exits_as_the_worker_does(tmp_path: Path) -> None:
    with keeper(tmp_path, "wait") as run:
        run.pid(0)
        run.popen.terminate()
        assert run.ended() == 128 + signal.SIGTERM
        assert run.notes.count("started") == 1


def test_a_second_signal_is_passed_on_too(tmp_path: Path) -> None:
    with keeper(tmp_path, "ignore+put:kv:one+get:kv:one+wait") as run:
        run.until(lambda notes: "found" in notes)
        run.popen.terminate()
        run.popen.send_signal(signal.SIGINT)
        assert run.ended() == 128 + signal.SIGINT


def test_a_hangup_that_nohup_has_ignored_stays_ignored(tmp_path: Path) -> None:
    with keeper(tmp_path, "wait", before=["nohup"]) as run:
        for pid in (run.pid(0), run.popen.pid):
            [ignored] = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
            assert int(ignored, 16) & 1 << signal.SIGHUP - 1
        run.popen.terminate()  # also the worker, which would outlive a keeper that is killed
        run.ended()


def test_deaths_are_seen_where_the_parent_has_ignored_those_of_children(tmp_path: Path) -> None:
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    before = [sys.executable, "-c", ignoring]
    with keeper(tmp_path, "die:SIGKILL", "exit:7", "exit:0", before=before) as run:
        assert run.ended() == 0
        assert "1 started by SIGKILL" in run.notes
        assert "2 started by exit" in run.notes


def test_a_worker_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "worker"
    program.write_text('#!/bin/sh\nrm "$0"; kill -KILL $$\n')
    program.chmod(0o755)
    with keeper(tmp_path, command=[str(program)]) as run:
        assert run.popen.stderr is not None
        while "cannot be started" not in (line := run.popen.stderr.readline()):
            assert line
        other = tmp_path / "other"
        other.write_text("#!/bin/sh\nexit 0\n")
        other.chmod(0o755)
        other.rename(program)
        assert run.ended() == 0


def test_a_program_that_is_not_there_ends_the_keeper_with_the_code_of_a_shell(tmp_path: Path) -> None:
    with keeper(tmp_path, command=[str(tmp_path / "none")]) as run:
        assert run.ended() == 126


def test_the_socket_of_the_keeper_and_kept_descriptors_are_not_inherited(tmp_path: Path) -> None:
    with keeper(tmp_path, "put:kv:one+get:kv:one+inherited+exit:0") as run:
        assert run.ended() == 0
        assert "0 inherited [0, 1, 2] and no number" in run.notes


def test_the_time_since_the_loss_includes_that_of_starting_the_program(tmp_path: Path) -> None:
    with keeper(tmp_path, "die:SIGKILL", "lost+exit:0") as run:
        assert run.ended() == 0
    [line] = [line for line in run.notes.splitlines() if "lost for" in line]
    lived, lost = (float(each.rpartition(" ")[2]) for each in line.split(","))
    # The start of a process is known to a hundredth of a second.
    assert lost > lived - 0.02


def test_an_exit_without_an_error_is_final(tmp_path: Path) -> None:
    with keeper(tmp_path, "exit:0") as run:
        assert run.ended() == 0
        assert run.notes.count("started") == 1


def test_a_wrong_configuration_is_final(tmp_path: Path) -> None:
    with keeper(tmp_path, "exit:2") as run:
        assert run.ended() == 2
        assert run.notes.count("started") == 1


def test_what_is_kept_is_freed_if_the_worker_fails_again_and_again(tmp_path: Path) -> None:
    finds = "get:kv:one+get:weights:two+exit:1"
    with keeper(tmp_path, "put:kv:one+put:weights:two+exit:1", *[finds] * 6, "exit:0") as run:
        assert run.ended() == 0
        kept = [line for line in run.notes.splitlines() if "found" in line]
        assert [line[:10] for line in kept if "['kv of one']" in line] == ["1 found kv", "2 found kv"]
        assert [line[0] for line in kept if "['weights of two']" in line] == list("12345")


def test_a_worker_that_fails_ten_times_in_a_row_ends_thekeeper(tmp_path: Path) -> None:
    with keeper(tmp_path, "exit:7") as run:
        assert run.ended() == 7
        assert run.notes.count("started") == 10


def test_a_worker_that_beats_and_fails_in_its_start_counts_as_failed(tmp_path: Path) -> None:
    with keeper(tmp_path, "put:kv:one+beat:1+exit:7", "get:kv:one+beat:1+exit:7") as run:
        assert run.ended() == 7
        assert run.notes.count("started") == 10
        assert run.notes.count("['kv of one']") == 2


def test_a_worker_whose_keeper_is_killed_ends(tmp_path: Path) -> None:
    with keeper(tmp_path, "beat:600") as run:
        pid = run.pid(0)
        descriptor = os.pidfd_open(pid)
        run.popen.kill()
        assert is_readable(descriptor, SECONDS)


@pytest.mark.parametrize("words", ["watch:600+stop", "stop"])
def test_a_stopped_worker_whose_keeper_is_killed_ends_too(tmp_path: Path, words: str) -> None:
    with keeper(tmp_path, words) as run:
        pid = run.pid(0)
        descriptor = os.pidfd_open(pid)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        run.popen.kill()
        assert is_readable(descriptor, SECONDS)


def test_a_start_that_hangs_is_killed_and_counts_as_a_failure(tmp_path: Path) -> None:
    with keeper(tmp_path, "put:kv:one+start:0.2+stop", "get:kv:one+beat:1+start:0.2+wait", "exit:0") as run:
        assert run.ended() == 0
        assert "1 started by hang" in run.notes
        assert "1 found kv ['kv of one']" in run.notes
        assert "2 started by hang" in run.notes


def test_a_start_may_take_as_long_as_it_says(tmp_path: Path) -> None:
    with keeper(tmp_path, "start:0.1+start:600+beat:20+exit:0") as run:
        assert run.ended() == 0
        assert run.notes.count("started") == 1


def test_an_older_keeper_that_knows_no_upgrades_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 0.2)
    own, end = pair()
    with own:
        send(own, Answer())
        worker = client.KeeperClient(end)
        with pytest.raises(KeeperLost):
            worker.upgrade()
        worker.close()


def test_the_keeper_imports_nothing_but_the_standard_library() -> None:
    program = (
        "import sys; before = set(sys.modules); import services.keeper.__main__; print(*set(sys.modules) - before)"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    own = {"runtime", "services", "baton_http2"}
    foreign = {name.partition(".")[0] for name in found.split()} - own - set(sys.stdlib_module_names)
    assert not foreign
