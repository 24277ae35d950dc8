"""The keeper, with programs in the worker's place: what it keeps, when it starts them again, and how it ends."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cluster.processes import ROOT

from services.keeper import client
from services.keeper.messages import Answer, KeeperLost, pair, send

_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """A keeper, and what its workers have noted."""

    popen: "subprocess.Popen[str]"
    file: Path

    @property
    def notes(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    def until(self, holds: Callable[[str], bool]) -> str:
        ends_at = time.monotonic() + _SECONDS
        while not holds(self.notes):
            assert time.monotonic() < ends_at, self.notes
            time.sleep(0.01)
        return self.notes

    def pid(self, start: int) -> int:
        """The process of this start."""
        notes = self.until(lambda notes: f"{start} started" in notes and notes.endswith("\n"))
        [line] = [line for line in notes.splitlines() if line.startswith(f"{start} started")]
        return int(line.rpartition(" ")[2])

    def ended(self) -> int:
        return self.popen.wait(_SECONDS)


@contextlib.contextmanager
def _keeper(folder: Path, *starts: str, before: Sequence[str] = (), command: Sequence[str] = ()) -> Iterator[Run]:
    # Without the long waits after many failures.
    program = "import sys; from services.keeper import keeper; keeper._LONGEST_WAIT = 0.05; "
    program += "sys.exit(keeper.Keeper(sys.argv[1:]).run())"
    file = folder / "notes"
    worker = command or [sys.executable, "-m", "support.kept_program", str(file), *starts]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])}
    keeper = [*before, sys.executable, "-c", program, *worker]
    with subprocess.Popen(keeper, env=paths, stderr=subprocess.PIPE, text=True) as popen:
        try:
            yield Run(popen, file)
        finally:
            popen.kill()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_worker_that_is_killed_is_started_again_and_finds_what_was_kept(tmp_path: Path, name: str) -> None:
    with _keeper(tmp_path, f"put:kv:one+put:weights:two+die:{name}", "get:kv:one+get:weights:two+exit:0") as run:
        assert run.ended() == 0
        assert f"1 started by {name}" in run.notes
        assert "1 found kv ['kv of one'] stale ''" in run.notes
        assert "1 found weights ['weights of two'] stale ''" in run.notes


def test_a_signal_without_a_name_is_a_death_like_others(tmp_path: Path) -> None:
    with _keeper(tmp_path, f"die:{signal.SIGRTMIN + 6}", "exit:0") as run:
        assert run.ended() == 0
        assert f"1 started by signal {signal.SIGRTMIN + 6}" in run.notes


def test_memory_with_another_fingerprint_is_freed_and_said(tmp_path: Path) -> None:
    with _keeper(tmp_path, "put:kv:one+die:SIGKILL", "get:kv:other+get:kv:one+exit:0") as run:
        assert run.ended() == 0
        assert "1 found kv [] stale 'one'" in run.notes
        assert "1 found kv [] stale ''" in run.notes


def test_memory_is_freed_when_told_and_replaced_by_later_memory(tmp_path: Path) -> None:
    with _keeper(tmp_path, "put:a:1+put:b:1+put:b:2+drop:a+die:SIGKILL", "get:a:1+get:b:2+exit:0") as run:
        assert run.ended() == 0
        assert "1 found a [] stale ''" in run.notes
        assert "1 found b ['b of 2'] stale ''" in run.notes


def test_a_worker_that_gives_no_sign_of_life_is_killed_and_started_again(tmp_path: Path) -> None:
    with _keeper(tmp_path, "put:kv:one+watch:0.3+beat:3+wait", "get:kv:one+exit:0") as run:
        assert run.ended() == 0
        assert "1 started by hang" in run.notes
        assert "1 found kv ['kv of one']" in run.notes


def test_a_stopped_worker_dies_before_another_one_starts(tmp_path: Path) -> None:
    with _keeper(tmp_path, "watch:0.5+beat:1+started+beat:600", "exit:0") as run:
        first = run.pid(0)
        run.until(lambda notes: "started again" in notes)  # before it is watched it may take long to start
        os.kill(first, signal.SIGSTOP)
        assert run.ended() == 0
        assert "1 started by hang" in run.notes
        with pytest.raises(ProcessLookupError):
            os.kill(first, signal.SIGCONT)


def test_a_worker_that_beats_is_not_killed(tmp_path: Path) -> None:
    with _keeper(tmp_path, "watch:2+beat:40+exit:0") as run:
        assert run.ended() == 0
        assert run.notes.count("started") == 1


def test_a_worker_that_gets_no_processor_is_not_killed(tmp_path: Path) -> None:
    with _keeper(tmp_path, "watch:1.4+starve:8+exit:0") as run:
        assert run.ended() == 0
        assert run.notes.count("started") == 1
    [late] = re.findall("beat after (.*) at the latest", run.notes)
    assert float(late) > 1.5, "the machine was too fast to starve anybody"


def test_a_worker_that_computes_without_an_end_is_killed(tmp_path: Path) -> None:
    with _keeper(tmp_path, "watch:0.5+spin", "exit:0") as run:
        assert run.ended() == 0
        assert "1 started by hang" in run.notes


def test_sigterm_is_passed_on_and_the_keeper_exits_as_the_worker_does(tmp_path: Path) -> None:
    with _keeper(tmp_path, "wait") as run:
        run.pid(0)
        run.popen.terminate()
        assert run.ended() == 128 + signal.SIGTERM
        assert run.notes.count("started") == 1


def test_a_second_signal_is_passed_on_too(tmp_path: Path) -> None:
    with _keeper(tmp_path, "ignore+put:kv:one+get:kv:one+wait") as run:
        run.until(lambda notes: "found" in notes)
        run.popen.terminate()
        run.popen.send_signal(signal.SIGINT)
        assert run.ended() == 128 + signal.SIGINT


def test_a_hangup_that_nohup_has_ignored_stays_ignored(tmp_path: Path) -> None:
    with _keeper(tmp_path, "wait", before=["nohup"]) as run:
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
    with _keeper(tmp_path, "die:SIGKILL", "exit:7", "exit:0", before=before) as run:
        assert run.ended() == 0
        assert "1 started by SIGKILL" in run.notes
        assert "2 started by exit" in run.notes


def test_a_worker_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "worker"
    program.write_text('#!/bin/sh\nrm "$0"; kill -KILL $$\n')
    program.chmod(0o755)
    with _keeper(tmp_path, command=[str(program)]) as run:
        assert run.popen.stderr is not None
        while "cannot be started" not in (line := run.popen.stderr.readline()):
            assert line
        other = tmp_path / "other"
        other.write_text("#!/bin/sh\nexit 0\n")
        other.chmod(0o755)
        other.rename(program)
        assert run.ended() == 0


def test_a_program_that_is_not_there_ends_the_keeper_with_the_code_of_a_shell(tmp_path: Path) -> None:
    with _keeper(tmp_path, command=[str(tmp_path / "none")]) as run:
        assert run.ended() == 126


def test_the_socket_of_the_keeper_and_kept_descriptors_are_not_inherited(tmp_path: Path) -> None:
    with _keeper(tmp_path, "put:kv:one+get:kv:one+inherited+exit:0") as run:
        assert run.ended() == 0
        assert "0 inherited [0, 1, 2] and no number" in run.notes


def test_the_time_since_the_loss_includes_that_of_starting_the_program(tmp_path: Path) -> None:
    with _keeper(tmp_path, "die:SIGKILL", "lost+exit:0") as run:
        assert run.ended() == 0
    [line] = [line for line in run.notes.splitlines() if "lost for" in line]
    lived, lost = (float(each.rpartition(" ")[2]) for each in line.split(","))
    # The start of a process is known to a hundredth of a second.
    assert lost > lived - 0.02


def test_an_exit_without_an_error_is_final(tmp_path: Path) -> None:
    with _keeper(tmp_path, "exit:0") as run:
        assert run.ended() == 0
        assert run.notes.count("started") == 1


def test_a_wrong_configuration_is_final(tmp_path: Path) -> None:
    with _keeper(tmp_path, "exit:2") as run:
        assert run.ended() == 2
        assert run.notes.count("started") == 1


def test_what_is_kept_is_freed_if_the_worker_fails_again_and_again(tmp_path: Path) -> None:
    finds = "get:kv:one+get:weights:two+exit:1"
    with _keeper(tmp_path, "put:kv:one+put:weights:two+exit:1", *[finds] * 6, "exit:0") as run:
        assert run.ended() == 0
        kept = [line for line in run.notes.splitlines() if "found" in line]
        assert [line[:10] for line in kept if "['kv of one']" in line] == ["1 found kv", "2 found kv"]
        assert [line[0] for line in kept if "['weights of two']" in line] == list("12345")


def test_a_worker_that_fails_ten_times_in_a_row_ends_the_keeper(tmp_path: Path) -> None:
    with _keeper(tmp_path, "exit:7") as run:
        assert run.ended() == 7
        assert run.notes.count("started") == 10


def test_a_worker_that_beats_and_fails_in_its_start_counts_as_failed(tmp_path: Path) -> None:
    with _keeper(tmp_path, "put:kv:one+beat:1+exit:7", "get:kv:one+beat:1+exit:7") as run:
        assert run.ended() == 7
        assert run.notes.count("started") == 10
        assert run.notes.count("['kv of one']") == 2


def test_a_worker_whose_keeper_is_killed_ends(tmp_path: Path) -> None:
    with _keeper(tmp_path, "beat:600") as run:
        pid = run.pid(0)
        descriptor = os.pidfd_open(pid)
        run.popen.kill()
        assert select.select([descriptor], [], [], _SECONDS)[0]


@pytest.mark.parametrize("words", ["watch:600+stop", "stop"])
def test_a_stopped_worker_whose_keeper_is_killed_ends_too(tmp_path: Path, words: str) -> None:
    with _keeper(tmp_path, words) as run:
        pid = run.pid(0)
        descriptor = os.pidfd_open(pid)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        run.popen.kill()
        assert select.select([descriptor], [], [], _SECONDS)[0]


def test_a_start_that_hangs_is_killed_and_counts_as_a_failure(tmp_path: Path) -> None:
    with _keeper(tmp_path, "put:kv:one+start:0.2+stop", "get:kv:one+beat:1+start:0.2+wait", "exit:0") as run:
        assert run.ended() == 0
        assert "1 started by hang" in run.notes
        assert "1 found kv ['kv of one']" in run.notes
        assert "2 started by hang" in run.notes


def test_a_start_may_take_as_long_as_it_says(tmp_path: Path) -> None:
    with _keeper(tmp_path, "start:0.1+start:600+beat:20+exit:0") as run:
        assert run.ended() == 0
        assert run.notes.count("started") == 1


def test_an_upgrade_gives_what_is_kept_to_a_process_that_has_loaded_beside_the_worker(tmp_path: Path) -> None:
    first = "put:kv:one+put:weights:two+watch:600+upgrade+die:SIGKILL"
    with _keeper(tmp_path, first, "get:weights:two+get:kv:one+lost+exit:0") as run:
        assert run.ended() == 0
    order = [line.partition(" as ")[0] for line in run.notes.splitlines()]
    assert order[:4] == [
        "0 started by nothing",
        "1 started by upgrade",
        "1 found weights ['weights of two'] stale ''",
        "0 upgrade: ready",
    ]
    assert order[4] == "1 found kv ['kv of one'] stale ''"
    lost = float(order[5].rpartition(" ")[2])
    assert 0 <= lost < 60


def test_a_worker_that_does_not_end_for_its_upgrade_is_killed(tmp_path: Path) -> None:
    with _keeper(tmp_path, "put:kv:one+watch:600+upgrade+wait", "get:kv:one+exit:0") as run:
        assert run.ended() == 0
        assert "1 found kv ['kv of one']" in run.notes


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("get:kv:other", "the new process does not fit: it needs KV of another form: other"),
        ("get:listen:here", "the new process does not fit: it keeps no KV"),
        ("exit:2", "the new process has ended; its log says why"),
        ("die:SIGSEGV", "the new process has ended; its log says why"),
        ("start:0.2+wait", "the new process has not become ready in time"),
        ("start:0.5+beat:600", "the new process has not become ready in time"),
    ],
)
def test_an_upgrade_that_does_not_fit_says_why_and_the_worker_goes_on(tmp_path: Path, words: str, problem: str) -> None:
    first = "put:kv:one+put:listen:here+watch:600+upgrade+get:kv:one+exit:0"
    with _keeper(tmp_path, first, f"drop:kv+put:weights:new+{words}") as run:
        assert run.ended() == 0
        assert f"0 upgrade: {problem}" in run.notes
        # What the new process wanted is forgotten with it.
        assert "0 found kv ['kv of one'] stale ''" in run.notes


def test_a_successor_has_kept_and_freed_what_it_wanted_once_it_takes_over(tmp_path: Path) -> None:
    first = "put:kv:one+put:weights:two+put:other:three+watch:600+upgrade+die:SIGKILL"
    second = "get:weights:new+put:weights:new+drop:other+get:kv:one+get:weights:new+get:other:three+exit:0"
    with _keeper(tmp_path, first, second) as run:
        assert run.ended() == 0
    assert "1 found weights [] stale ''" in run.notes
    assert run.notes.index("found kv ['kv of one']") < run.notes.index("found weights ['weights of new']")
    assert "1 found other [] stale ''" in run.notes


def test_a_worker_that_hangs_while_its_successor_loads_and_beats_is_killed(tmp_path: Path) -> None:
    first, loading = "put:kv:one+watch:0.5+hang_upgrade", "start:600+beat:6000"
    with _keeper(tmp_path, first, loading, "get:kv:one+exit:0") as run:
        assert run.ended() == 0
        assert "2 started by hang" in run.notes
        assert "2 found kv ['kv of one']" in run.notes


def test_a_worker_that_is_told_to_stop_amid_an_upgrade_has_the_time_that_it_needs(tmp_path: Path) -> None:
    first = "put:kv:one+watch:600+ignore+upgrade+get:kv:one+exit:0"
    with _keeper(tmp_path, first, "start:600+beat:6000") as run:
        loading = run.pid(1)
        run.popen.terminate()
        assert run.ended() == 0
        assert "0 upgrade: the worker was told to stop" in run.notes
        assert "0 found kv ['kv of one']" in run.notes
        with pytest.raises(ProcessLookupError):
            os.kill(loading, 0)


def test_a_worker_that_dies_while_its_successor_loads_is_started_again_as_always(tmp_path: Path) -> None:
    first = "put:kv:one+watch:600+upgrade"
    with _keeper(tmp_path, first, "start:600+wait", "get:kv:one+exit:0") as run:
        loading = run.pid(1)
        os.kill(run.pid(0), signal.SIGKILL)
        assert run.ended() == 0
        assert "2 started by SIGKILL" in run.notes
        assert "2 found kv ['kv of one']" in run.notes
        with pytest.raises(ProcessLookupError):
            os.kill(loading, 0)


def test_a_keeper_that_is_told_to_stop_amid_an_upgrade_ends_both(tmp_path: Path) -> None:
    with _keeper(tmp_path, "put:kv:one+watch:600+upgrade", "start:600+wait") as run:
        loading = run.pid(1)
        run.popen.terminate()
        assert run.ended() == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(loading, 0)


def test_a_worker_that_was_told_to_stop_is_not_upgraded(tmp_path: Path) -> None:
    first = "hold+put:kv:one+watch:600+get:kv:one+held+upgrade+exit:0"
    with _keeper(tmp_path, first, "get:kv:one+exit:0") as run:
        run.until(lambda notes: "0 found kv" in notes)
        run.popen.terminate()
        assert run.ended() == 0
        assert "0 upgrade: the worker was told to stop" in run.notes
        assert run.notes.count("started") == 1


_STANDS_BY = "put:kv:one+put:weights:two+watch:600+stand_by"


def test_a_process_that_stands_by_takes_over_from_a_worker_that_is_killed(tmp_path: Path) -> None:
    first = f"{_STANDS_BY}+until:1 found weights+die:SIGKILL"
    with _keeper(tmp_path, first, "get:weights:two+get:kv:one+started+lost+watch:600+exit:0") as run:
        assert run.ended() == 0
    assert "1 found kv ['kv of one'] stale ''" in run.notes
    assert "1 started again by SIGKILL" in run.notes
    assert run.notes.count("started by") == 2


def test_a_process_that_stands_by_may_wait_for_longer_than_a_start_takes(tmp_path: Path) -> None:
    first = f"{_STANDS_BY}+until:1 found weights+beat:6+die:SIGKILL"
    with _keeper(tmp_path, first, "start:0.4+get:weights:two+get:kv:one+exit:0") as run:
        assert run.ended() == 0
    assert "1 found kv ['kv of one'] stale ''" in run.notes


@pytest.mark.parametrize("words", ["start:600+wait", "get:kv:other+wait", "exit:1"])
def test_a_process_that_is_not_ready_to_take_over_is_replaced(tmp_path: Path, words: str) -> None:
    first = f"{_STANDS_BY}+until:1 started+beat:3+die:SIGKILL"
    with _keeper(tmp_path, first, words, "get:kv:one+exit:0") as run:
        assert run.ended() == 0
    assert "2 started by SIGKILL" in run.notes
    assert "2 found kv ['kv of one'] stale ''" in run.notes


def test_a_process_that_stands_by_does_not_follow_the_second_failure_in_a_row(tmp_path: Path) -> None:
    first = f"{_STANDS_BY}+until:1 found weights+die:SIGKILL"
    second = "get:weights:two+get:kv:one+watch:600+stand_by+until:2 found weights+die:SIGKILL"
    with _keeper(tmp_path, first, second, "get:weights:two+get:kv:one+exit:0") as run:
        assert run.ended() == 0
    assert "2 found kv" not in run.notes
    assert "3 started by SIGKILL" in run.notes
    assert "3 found kv ['kv of one'] stale ''" in run.notes


def test_a_process_that_stands_by_ends_with_a_worker_that_is_told_to_stop(tmp_path: Path) -> None:
    with _keeper(tmp_path, f"{_STANDS_BY}+hold+until:1 found weights+held+exit:0", "get:weights:two+get:kv:one") as run:
        standby = run.pid(1)
        run.until(lambda notes: "1 found weights" in notes)
        run.popen.terminate()
        assert run.ended() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(standby, 0)


def test_an_upgrade_begins_a_new_process_in_the_place_of_the_one_that_stands_by(tmp_path: Path) -> None:
    first = f"{_STANDS_BY}+until:1 found weights+upgrade+die:SIGKILL"
    with _keeper(tmp_path, first, "get:weights:two+get:kv:one", "get:kv:one+exit:0") as run:
        assert run.ended() == 0
    assert "0 upgrade: ready" in run.notes
    assert "1 found kv" not in run.notes
    assert "2 found kv ['kv of one'] stale ''" in run.notes


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
