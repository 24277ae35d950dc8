"""The folder of a local cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from client.local.plan import ClusterOptions
from client.local.state import AlreadyRunning, ClusterState, StateFolder

STATE = ClusterState(options=ClusterOptions(), supervisor_pid=1, address="127.0.0.1:7070", processes=())


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / ".baton")


def test_a_folder_that_is_owned_has_a_supervisor(folder: StateFolder) -> None:
    assert not folder.has_supervisor
    with folder.owned():
        assert folder.has_supervisor
        assert folder.supervisor_pid() == os.getpid()
    assert not folder.has_supervisor


def test_a_folder_has_one_owner(folder: StateFolder) -> None:
    with folder.owned(), pytest.raises(AlreadyRunning), StateFolder(folder.path).owned():
        pass


def test_the_owner_leaves_nothing_but_logs_and_the_lock(folder: StateFolder) -> None:
    with folder.owned():
        folder.write(STATE)
        (folder.path / "etcd").mkdir()
        folder.logs.mkdir()
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "logs"]


def test_the_state_of_an_owner_that_was_killed_is_not_believed(folder: StateFolder) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from client.local.state import *;"
        f"folder = StateFolder(Path({str(folder.path)!r})); own = folder.owned(); own.__enter__();"
        f"folder.write(ClusterState.model_validate_json({STATE.model_dump_json()!r}));"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], check=False, timeout=30)
    assert (folder.path / "state.json").exists()
    assert folder.read() is None
    with folder.owned():
        assert not (folder.path / "state.json").exists()


def test_clients_find_the_address(folder: StateFolder) -> None:
    with folder.owned():
        folder.write(STATE)
        assert (folder.path / "address").read_text() == "127.0.0.1:7070\n"


def test_a_state_that_is_written_is_read(folder: StateFolder) -> None:
    with folder.owned():
        folder.write(STATE)
        assert folder.read() == STATE
