"""The keeper's upgrades, and the process that stands by for a worker that is killed."""

import os
import signal
from pathlib import Path

import pytest
from support.keeper import keeper


def test_an_upgrade_gives_what_is_kept_to_a_process_that_has_loaded_beside_the_worker(tmp_path: Path) -> None:
    first = "put:kv:one+put:weights:two+watch:600+upgrade+die:SIGKILL"
    with keeper(tmp_path, first, "get:weights:two+get:kv:one+lost+exit:0") as run:
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
    with keeper(tmp_path, "put:kv:one+watch:600+upgrade+wait", "get:kv:one+exit:0") as run:
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
    with keeper(tmp_path, first, f"drop:kv+put:weights:new+{words}") as run:
        assert run.ended() == 0
        assert f"0 upgrade: {problem}" in run.notes
        # What the new process wanted is forgotten with it.
        assert "0 found kv ['kv of one'] stale ''" in run.notes


def test_a_successor_has_kept_and_freed_what_it_wanted_once_it_takes_over(tmp_path: Path) -> None:
    first = "put:kv:one+put:weights:two+put:other:three+watch:600+upgrade+die:SIGKILL"
    second = "get:weights:new+put:weights:new+drop:other+get:kv:one+get:weights:new+get:other:three+exit:0"
    with keeper(tmp_path, first, second) as run:
        assert run.ended() == 0
    assert "1 found weights [] stale ''" in run.notes
    assert run.notes.index("found kv ['kv of one']") < run.notes.index("found weights ['weights of new']")
    assert "1 found other [] stale ''" in run.notes


def test_a_worker_that_hangs_while_its_successor_loads_and_beats_is_killed(tmp_path: Path) -> None:
    first, loading = "put:kv:one+watch:0.5+hang_upgrade", "start:600+beat:6000"
    with keeper(tmp_path, first, loading, "get:kv:one+exit:0") as run:
        assert run.ended() == 0
        assert "2 started by hang" in run.notes
        assert "2 found kv ['kv of one']" in run.notes


def test_a_worker_that_is_told_to_stop_amid_an_upgrade_has_the_time_that_it_needs(tmp_path: Path) -> None:
    first = "put:kv:one+watch:600+ignore+upgrade+get:kv:one+exit:0"
    with keeper(tmp_path, first, "start:600+beat:6000") as run:
        loading = run.pid(1)
        run.popen.terminate()
        assert run.ended() == 0
        assert "0 upgrade: the worker was told to stop" in run.notes
        assert "0 found kv ['kv of one']" in run.notes
        with pytest.raises(ProcessLookupError):
            os.kill(loading, 0)


def test_a_worker_that_dies_while_its_successor_loads_is_started_again_as_always(tmp_path: Path) -> None:
    first = "put:kv:one+watch:600+upgrade"
    with keeper(tmp_path, first, "start:600+wait", "get:kv:one+exit:0") as run:
        loading = run.pid(1)
        os.kill(run.pid(0), signal.SIGKILL)
        assert run.ended() == 0
        assert "2 started by SIGKILL" in run.notes
        assert "2 found kv ['kv of one']" in run.notes
        with pytest.raises(ProcessLookupError):
            os.kill(loading, 0)


def test_a_keeper_that_is_told_to_stop_amid_an_upgrade_ends_both(tmp_path: Path) -> None:
    with keeper(tmp_path, "put:kv:one+watch:600+upgrade", "start:600+wait") as run:
        loading = run.pid(1)
        run.popen.terminate()
        assert run.ended() == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(loading, 0)


def test_a_worker_that_was_told_to_stop_is_not_upgraded(tmp_path: Path) -> None:
    first = "hold+put:kv:one+watch:600+get:kv:one+held+upgrade+exit:0"
    with keeper(tmp_path, first, "get:kv:one+exit:0") as run:
        run.until(lambda notes: "0 found kv" in notes)
        run.popen.terminate()
        assert run.ended() == 0
        assert "0 upgrade: the worker was told to stop" in run.notes
        assert run.notes.count("started") == 1


_STANDS_BY = "put:kv:one+put:weights:two+watch:600+stand_by"


def test_a_process_that_stands_by_takes_over_from_a_worker_that_is_killed(tmp_path: Path) -> None:
    first = f"{_STANDS_BY}+until:1 found weights+die:SIGKILL"
    with keeper(tmp_path, first, "get:weights:two+get:kv:one+started+lost+watch:600+exit:0") as run:
        assert run.ended() == 0
    assert "1 found kv ['kv of one'] stale ''" in run.notes
    assert "1 started again by SIGKILL" in run.notes
    assert run.notes.count("started by") == 2


def test_a_process_that_stands_by_may_wait_for_longer_than_a_start_takes(tmp_path: Path) -> None:
    first = f"{_STANDS_BY}+until:1 found weights+beat:6+die:SIGKILL"
    with keeper(tmp_path, first, "start:0.4+get:weights:two+get:kv:one+exit:0") as run:
        assert run.ended() == 0
    assert "1 found kv ['kv of one'] stale ''" in run.notes


@pytest.mark.parametrize("words", ["start:600+wait", "get:kv:other+wait", "exit:1"])
def test_a_process_that_is_not_ready_to_take_over_is_replaced(tmp_path: Path, words: str) -> None:
    first = f"{_STANDS_BY}+until:1 started+beat:3+die:SIGKILL"
    with keeper(tmp_path, first, words, "get:kv:one+exit:0") as run:
        assert run.ended() == 0
    assert "2 started by SIGKILL" in run.notes
    assert "2 found kv ['kv of one'] stale ''" in run.notes


def test_a_process_that_stands_by_does_not_follow_the_second_failure_in_a_row(tmp_path: Path) -> None:
    first = f"{_STANDS_BY}+until:1 found weights+die:SIGKILL"
    second = "get:weights:two+get:kv:one+watch:600+stand_by+until:2 found weights+die:SIGKILL"
    with keeper(tmp_path, first, second, "get:weights:two+get:kv:one+exit:0") as run:
        assert run.ended() == 0
    assert "2 found kv" not in run.notes
    assert "3 started by SIGKILL" in run.notes
    assert "3 found kv ['kv of one'] stale ''" in run.notes


def test_a_process_that_stands_by_ends_with_a_worker_that_is_told_to_stop(tmp_path: Path) -> None:
    with keeper(tmp_path, f"{_STANDS_BY}+hold+until:1 found weights+held+exit:0", "get:weights:two+get:kv:one") as run:
        standby = run.pid(1)
        run.until(lambda notes: "1 found weights" in notes)
        run.popen.terminate()
        assert run.ended() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(standby, 0)


def test_an_upgrade_begins_a_new_process_in_the_place_of_the_one_that_stands_by(tmp_path: Path) -> None:
    first = f"{_STANDS_BY}+until:1 found weights+upgrade+die:SIGKILL"
    with keeper(tmp_path, first, "get:weights:two+get:kv:one", "get:kv:one+exit:0") as run:
        assert run.ended() == 0
    assert "0 upgrade: ready" in run.notes
    assert "1 found kv" not in run.notes
    assert "2 found kv ['kv of one'] stale ''" in run.notes
