"""The records of a group's workers, in processes that live and die."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.keeping import keeper_here

from baton.errors import ConfigError
from services.sleeping.group import Member, Membership

A, B = Member("a", 6, 10), Member("b", 6, 10)
# Joins, has its memory, says so, and lives on.
_PROGRAM = """
import sys, time
from dataclasses import replace
from pathlib import Path
from services.sleeping.group import Member, Membership
own = Member("b", 6, 10)
with Membership.join(Path(sys.argv[1]), own, None) as joined:
    joined.update(lambda others: replace(own, is_awake=True))
    print("awake", flush=True)
    time.sleep(600)
"""


@contextmanager
def another_process(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that is the worker b, awake."""
    arguments = [sys.executable, "-c", _PROGRAM, str(folder)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "awake\n"
            yield process
        finally:
            process.kill()


def others_of(joined: Membership, own: Member = A) -> list[Member]:
    """A worker's view of the others."""
    found: list[Member] = []

    def decide(others: object) -> Member:
        found.extend(others)  # type: ignore[arg-type]
        return own

    assert joined.update(decide) is not None
    return found


def test_a_worker_sees_what_another_process_writes_until_that_dies(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    with Membership.join(folder, A, None) as joined:
        with another_process(folder) as process:
            assert others_of(joined) == [replace(B, is_awake=True)]
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert others_of(joined) == []
        assert len(list(folder.glob("*.member"))) == 1


def test_a_process_that_is_stopped_keeps_its_memory(tmp_path: Path) -> None:
    with Membership.join(tmp_path, A, None) as joined, another_process(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert others_of(joined) == [replace(B, is_awake=True)]


def test_what_a_dead_process_has_said_of_the_worker_is_forgotten(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        process.kill()
        process.wait()
    with Membership.join(tmp_path, B, None) as joined:
        assert joined.record == B


def test_with_a_keeper_the_memory_is_still_taken_while_no_process_lives(tmp_path: Path) -> None:
    with keeper_here() as keeper, Membership.join(tmp_path, A, None) as other:
        with keeper.memory() as kept, Membership.join(tmp_path, B, kept.keeper) as joined:
            joined.update(lambda _: replace(B, is_awake=True))
        assert others_of(other) == [replace(B, is_awake=True)]
        with keeper.memory() as kept, Membership.join(tmp_path, B, kept.keeper) as joined:
            assert joined.record == replace(B, is_awake=True)
        keeper.kept.drop("sleep_group")
        assert others_of(other) == []


def test_a_worker_is_in_a_group_once(tmp_path: Path) -> None:
    with Membership.join(tmp_path, A, None), pytest.raises(ConfigError, match="has a worker a already"):
        Membership.join(tmp_path, A, None)


def test_a_group_has_one_size(tmp_path: Path) -> None:
    with Membership.join(tmp_path, A, None) as joined:
        with pytest.raises(ConfigError, match=r"sleep.group_bytes: is 11, but a of the same group says 10"):
            Membership.join(tmp_path, replace(B, group_bytes=11), None)
        assert others_of(joined) == []


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"sleep.group: .*file/group cannot be used: "):
        Membership.join(tmp_path / "file" / "group", A, None)


def test_a_record_of_a_later_version_is_read(tmp_path: Path) -> None:
    with Membership.join(tmp_path, A, None) as joined, Membership.join(tmp_path, B, None):
        [path] = [each for each in tmp_path.glob("*.member") if '"b"' in each.read_text()]
        path.write_text(path.read_text().strip().replace("}", ', "later": 1}'))
        assert others_of(joined) == [B]


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Membership.join(tmp_path, A, None) as joined:
        others_of(joined)
        with pytest.raises(ConfigError):
            Membership.join(tmp_path, A, None)
        with pytest.raises(ConfigError):
            Membership.join(tmp_path, replace(B, group_bytes=11), None)
    assert set(os.listdir("/proc/self/fd")) == before
