"""The folder of a local cluster."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.local.plan import ClusterOptions
from cli.local.state import AlreadyRunning, ClusterState, StateFolder

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
        "import os, signal, sys; from pathlib import Path; from cli.local.state import *;"
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


def test_a_reader_that_stands_still_keeps_no_supervisor_from_its_folder(folder: StateFolder) -> None:
    program = (
        "from pathlib import Path; from cli.local.state import StateFolder;"
        f"folder = StateFolder(Path({str(folder.path)!r})); print(folder.has_supervisor, flush=True)\n"
        "while True: folder.has_supervisor"
    )
    folder.path.mkdir()
    (folder.path / "lock").touch()
    with ExitStack() as stack:
        readers = []
        for _ in range(8):
            readers.append(
                stack.enter_context(
                    subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
                )
            )
            stack.callback(readers[-1].kill)
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "False\n"
        for reader in readers:
            reader.send_signal(signal.SIGSTOP)
        with folder.owned():
            assert folder.has_supervisor


def test_a_supervisor_waits_for_a_cleaning_that_takes_long(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.local.state.STILL_SECONDS", 0.05)
    program = (
        "import sys; from pathlib import Path; from cli.local.state import StateFolder;"
        f"folder = StateFolder(Path({str(folder.path)!r})); own = folder.cleaned(); own.__enter__();"
        "print('cleaning', flush=True); sys.stdin.read(); own.__exit__(None, None, None)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as cleaner:
        assert cleaner.stdout is not None
        assert cleaner.stdin is not None
        assert cleaner.stdout.readline() == "cleaning\n"
        ending = threading.Timer(0.5, cleaner.stdin.close)
        ending.start()
        with folder.owned():
            assert cleaner.wait(10) == 0
        ending.join()
