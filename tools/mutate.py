"""Removes guards, one at a time, in a copy of the tree, and verifies that a named test fails each time.

    python tools/mutate.py tools/mutations/trtllm.yaml [--guard N...] [--jobs N]

A mutation names the guard, its only place in a file, and the test. Exit code 1 if a test still passes.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = (
    "services",
    "router",
    "discovery",
    "engine_protocol",
    "grammars",
    "media",
    "rpc",
    "runtime",
    "baton",
    "cli",
    "devtools",
    "protos",
    "tests",
    "models",
    "deploy",
)
_SECONDS = 170


@dataclass(frozen=True, slots=True)
class Mutation:
    """The removal of one guard."""

    guard: int
    removes: str
    file: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> str:
        """From the root of the tree."""
        return self.file if self.file.partition("/")[0] in _SOURCES else f"services/engines/trtllm/{self.file}"

    @property
    def test_id(self) -> str:
        """From the root of the tree."""
        return self.test if self.test.startswith("tests/") else f"tests/services/engines/trtllm/{self.test}"


def read(path: Path) -> list[Mutation]:
    """The mutations in a file. Raises TypeError for an entry with missing or unknown keys."""
    return [Mutation(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]


def mutated(mutation: Mutation, text: str) -> str:
    """The file's text without its guard. Raises ValueError unless the place occurs exactly once."""
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.path}: {mutation.old!r} occurs {text.count(mutation.old)} times")
    return text.replace(mutation.old, mutation.new)


class Trees:
    """Copies of the tree, one for each job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._local = threading.local()

    def run(self, mutation: Mutation) -> str:
        """The failure of the test without the guard; empty if it still passes."""
        tree = self._tree()
        file = tree / mutation.path
        whole = file.read_text(encoding="utf-8")
        file.write_text(mutated(mutation, whole), encoding="utf-8")
        try:
            return failure(tree, [mutation.test_id])
        finally:
            file.write_text(whole, encoding="utf-8")

    def _tree(self) -> Path:
        if not hasattr(self._local, "tree"):
            self._local.tree = self._folder / threading.current_thread().name
            self._local.tree.mkdir()
            for name in _SOURCES:
                shutil.copytree(ROOT / name, self._local.tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(ROOT / "pyproject.toml", self._local.tree)
        tree: Path = self._local.tree
        return tree


def failure(tree: Path, tests: Sequence[str]) -> str:
    """The reason for the first failure in one line. The copy's packages come first: it is the working directory."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=40", *tests]
    try:
        ended = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"did not end within {_SECONDS} s"
    if ended.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(tests)}: pytest ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
    why = next((line[2:].strip() for line in ended.stdout.splitlines() if line.startswith("E  ")), "failed")
    return why if ended.returncode else ""


def main() -> None:
    """Prints a line for each mutation, in order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--guard", type=int, nargs="+", help="only the guards with these numbers")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    mutations = [one for one in read(arguments.file) if one.guard in (arguments.guard or (one.guard,))]
    if why := failure(ROOT, sorted({one.test_id for one in mutations})):
        raise SystemExit(f"the tests do not pass as it is: {why}")
    print(f"{len({one.test_id for one in mutations})} tests pass. Without a guard:\n")
    survivors = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for mutation, why in zip(mutations, pool.map(Trees(Path(folder)).run, mutations), strict=True):
            survivors += not why
            verdict = f"fails: {why:.60}" if why else "STILL PASSES"
            name = mutation.test_id.rpartition("/")[2]
            print(f"{mutation.guard:>3}  {mutation.removes:<52} {verdict:<68} {name}", flush=True)
    print(f"\n{len(mutations)} guards were removed; the tests of {survivors} still passed.")
    raise SystemExit(1 if survivors else 0)


if __name__ == "__main__":
    main()
