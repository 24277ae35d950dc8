"""Local clusters of the demonstration model, each in a folder of its own, also while their workers are killed."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton import AsyncClient
from baton.errors import BatonError
from baton.inference.v1 import cluster_service_pb2
from cli.local.state import ClusterState, StateFolder
from engine_protocol.roles import roles

_ROOT = Path(__file__).resolve().parents[3]
_SECONDS_BETWEEN_KILLS = 3.0


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A running cluster of `baton up`."""

    folder: Path

    @property
    def state(self) -> ClusterState:
        """The state that its supervisor wrote last."""
        state = StateFolder(self.folder / ".baton").read()
        assert state is not None, f"no cluster runs in {self.folder}"
        return state

    @property
    def openai(self) -> str:
        """The URL of OpenAI's API, with /v1."""
        return next(f"http://{each.openai}/v1" for each in self.state.processes if each.openai)


@contextmanager
def cluster(folder: Path, model: Path, options: Sequence[str]) -> Iterator[LocalCluster]:
    """A cluster with these options of `baton up`. Raises CalledProcessError if it does not start."""
    folder.mkdir(parents=True, exist_ok=True)
    baton = [sys.executable, "-m", "cli"]
    run = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(_ROOT)}, "check": True, "stdout": subprocess.DEVNULL}
    try:
        subprocess.run([*baton, "up", "--model", str(model), *options], **run)  # type: ignore[call-overload]
        yield LocalCluster(folder)
    finally:
        subprocess.run([*baton, "down"], **run)  # type: ignore[call-overload]


@dataclass(slots=True)
class Kills:
    """Kills one worker after another while the context is open, each time as soon as all of them are ready again."""

    cluster: LocalCluster
    done: int = 0
    _enough: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._enough.set()
            thread.join()

    def _run(self) -> None:
        while not self._enough.wait(_SECONDS_BETWEEN_KILLS):
            state = self.cluster.state
            workers = [each for each in state.processes if each.role in roles()]
            victim = workers[self.done % len(workers)]
            if victim.pid and asyncio.run(_are_ready(state.address, len(workers))):
                os.kill(victim.pid, signal.SIGKILL)
                self.done += 1


async def _are_ready(address: str, count: int) -> bool:
    async with AsyncClient(address) as client:
        try:
            workers = await client.workers()
        except BatonError:
            return False
    return sum(each.state == cluster_service_pb2.WORKER_STATE_READY for each in workers) == count
