"""The container engine of this machine: docker if its daemon answers, or else podman."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PODMAN_CONFIG = Path(__file__).resolve().with_name("containers.conf")
QUESTION_SECONDS = 30


class NoEngine(Exception):
    """No container engine runs here; the message says what to install."""


class CommandFailed(Exception):
    """A command of the engine failed; the message has the end of what it printed."""


class Engine:
    """Calls docker or podman. CONTAINER_ENGINE=PROGRAM in the environment chooses."""

    def __init__(self, program: str, folder: Path | None = None) -> None:
        """Commands run in `folder`, or else where this process does; paths among their arguments depend on it."""
        self.is_podman = Path(program).name == "podman"
        self._program = program
        self._folder = folder
        # What runs podman for us, as podman-compose does, finds the configuration here too.
        self.environment = {**os.environ, "CONTAINERS_CONF": str(PODMAN_CONFIG)} if self.is_podman else dict(os.environ)

    def within(self, folder: Path) -> "Engine":
        """The same engine with its commands run in a folder: there podman leaves the file `oom` of a container."""
        return Engine(self._program, folder)

    def command(self, *arguments: str) -> list[str]:
        """The words of a command, for who runs it otherwise."""
        return [self._program, *arguments]

    def run(self, *arguments: str, seconds: float = 600.0) -> str:
        """Runs a command to its end, and returns what it printed. Raises CommandFailed."""
        command = self.command(*arguments)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=self.environment, cwd=self._folder
        )
        if done.returncode != 0:
            raise CommandFailed(f"{' '.join(arguments[:4])} ...: {(done.stderr or done.stdout).strip()[-2000:]}")
        return done.stdout

    def show(self, *arguments: str) -> None:
        """Runs a command whose output the user sees. Raises CommandFailed."""
        if subprocess.run(self.command(*arguments), env=self.environment, cwd=self._folder).returncode != 0:
            raise CommandFailed(f"{' '.join(arguments[:4])} ... failed")


def find_engine() -> Engine:
    """The engine that can be used here. Raises NoEngine."""
    chosen = os.environ.get("CONTAINER_ENGINE")
    if chosen:
        return Engine(chosen)
    if shutil.which("docker") and _answers(["docker", "version"]):
        return Engine("docker")
    if shutil.which("podman"):
        return Engine("podman")
    raise NoEngine("neither docker's daemon nor podman is here; on Debian: tools/install_system_packages.sh containers")


def _answers(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=QUESTION_SECONDS).returncode == 0
