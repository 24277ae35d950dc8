"""Plants each bug of mutants.yaml in a copy of the product, and tells how long it takes to be found.

    python -m simulation.mutants [NAME...] [--seconds 600]

Exit code 1 unless each is found. The copies have the product, its stubs and these files, and are deleted at the end.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
_FILE = Path(__file__).parent / "mutants.yaml"
_PRODUCT = (
    "router",
    "services",
    "discovery",
    "engine_protocol",
    "grammars",
    "media",
    "rpc",
    "runtime",
    "baton",
    "baton_http2",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug."""

    name: str
    models: str
    file: str
    old: str
    new: str
    held_out: bool = False


def read() -> list[Mutant]:
    """All of them. Raises TypeError for an entry with missing or unknown keys."""
    return [Mutant(**entry) for entry in yaml.safe_load(_FILE.read_text(encoding="utf-8"))]


def plant(mutant: Mutant, folder: Path) -> None:
    """Writes the product with the bug into an empty folder. Raises ValueError unless its place occurs once."""
    for name in _PRODUCT:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "protos", folder / "protos")
    shutil.copytree(ROOT / "tests" / "simulation", folder / "tests" / "simulation")
    file = folder / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def hunt(mutant: Mutant, seconds: float, seeds: str) -> tuple[bool, str]:
    """Runs seeds on the product with the bug, until one finds something. Returns whether, and what was printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(mutant, folder)
        command = [sys.executable, "-m", "simulation", "--seeds", seeds, "--stop", "--quiet", "--seconds", str(seconds)]
        environment = {**os.environ, "PYTHONPATH": f"{folder}/tests:{folder}", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=20 * seconds + 300
        )
        return done.returncode == 1 and "Traceback" not in done.stderr[-2000:], done.stdout + done.stderr[-1500:]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=600, help="of CPU for each")
    parser.add_argument("--seeds", default="0:")
    options = parser.parse_args()
    chosen = [mutant for mutant in read() if not options.names or mutant.name in options.names]
    found = 0
    for mutant in chosen:
        began = time.perf_counter()
        is_found, lines = hunt(mutant, options.seconds, options.seeds)
        found += is_found
        first = next((line.strip() for line in lines.splitlines() if line.startswith("    ")), lines[-200:])
        total = lines.strip().splitlines()[-1] if lines.strip() else ""
        cost = total.partition(";")[0] if is_found else f"NOT FOUND: {total[:200]}"
        print(f"{mutant.name}{' (held out)' if mutant.held_out else ''}: {time.perf_counter() - began:.0f} s, {cost}")
        print(f"    {first[:240]}", flush=True)
    print(f"{found} of {len(chosen)} found")
    sys.exit(found < len(chosen))


if __name__ == "__main__":
    main()
