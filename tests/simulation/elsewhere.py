"""Runs plans again in another process, where all objects have other addresses.

What has no order of its own may have one that depends on addresses: a message's map on that of a library, a set of
objects on theirs. Forks of one process have the same ones, and another process has them moved by whole pages: so each
run here takes some small objects first, which are as many as its number says, and a process makes few runs.
"""

# Before anything of Baton: its clocks are bound when it is imported.
from simulation import entropy  # noqa: F401  # isort: skip

import atexit
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from simulation.hashes import fix_hashes
from simulation.plan import Plan, read_plan
from simulation.running import in_child, run_here

_RUNS = 20  # of a process, whose imports take as long as two of them
_LARGEST_SMALL = 512  # bytes: an object of more has no pool of CPython's
_STEP = 16  # bytes, from one pool's size to the next
_EMPTY_BYTES = sys.getsizeof(b"")

_taken: list[object] = []


class _Process:
    """The other process, which begins with the first run and is another one after some."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._left = 0

    def run(self, file: Path, log: Path) -> None:
        """Returns when the run has ended."""
        if self._left == 0:
            self.end()
            self._left = _RUNS
            command = [sys.executable, "-m", "simulation.elsewhere"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        self._left -= 1
        self._process.stdin.write(f"{file} {log}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def end(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.communicate()


_other = _Process()
atexit.register(_other.end)


def run_elsewhere(plan: Plan) -> str:
    """The log of a run in another process; empty if the run has crashed."""
    with TemporaryDirectory() as folder:
        file, log = Path(folder, "plan.json"), Path(folder, "run.log")
        file.write_text(plan.to_json(), encoding="utf-8")
        _other.run(file, log)
        return log.read_text(encoding="utf-8") if log.exists() else ""


def main() -> None:
    """The other process: takes a line with the files of a plan and of a log for each run, until there are no more."""
    fix_hashes("simulation.elsewhere")
    answers = sys.stdout
    sys.stdout = sys.stderr
    for number, line in enumerate(sys.stdin, 1):
        file, log = line.split()
        try:
            in_child(partial(_run, number, Path(file), Path(log)))
        except ChildProcessError:
            print(f"the run of {file} has crashed")
        print(number, file=answers, flush=True)


def _run(number: int, file: Path, log: Path) -> None:
    for size in range(_STEP, _LARGEST_SMALL + 1, _STEP):
        for _ in range(number * size % 61):
            _taken.append(
                bytes(size - _EMPTY_BYTES) if size > _EMPTY_BYTES else float(number) if size > _STEP else object()
            )
    outcome = run_here(read_plan(file), keeps_log=True)
    log.write_text(outcome.log, encoding="utf-8")


if __name__ == "__main__":
    main()
