"""A keeper in a process of its own, with a program in the worker's place."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.cluster.processes import ROOT

SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """A keeper, and what its workers have noted."""

    popen: "subprocess.Popen[str]"
    file: Path

    @property
    def notes(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    def until(self, holds: Callable[[str], bool]) -> str:
        ends_at = time.monotonic() + SECONDS
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
        return self.popen.wait(SECONDS)


@contextlib.contextmanager
def keeper(folder: Path, *starts: str, before: Sequence[str] = (), command: Sequence[str] = ()) -> Iterator[Run]:
    # Without the long waits after many failures.
    program = "import sys; from services.keeper import keeper; keeper._LONGEST_WAIT = 0.05; "
    program += "sys.exit(keeper.Keeper(sys.argv[1:]).run())"
    file = folder / "notes"
    worker = command or [sys.executable, "-m", "support.kept_program", str(file), *starts]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])}
    words = [*before, sys.executable, "-c", program, *worker]
    with subprocess.Popen(words, env=paths, stderr=subprocess.PIPE, text=True) as popen:
        try:
            yield Run(popen, file)
        finally:
            popen.kill()
