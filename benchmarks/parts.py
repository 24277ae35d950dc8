"""Runs the parts of a measurement one after another, each in a process of its own with a limit, and prints Markdown."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG_LINES = 25


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its title, its module with arguments, its limit in seconds, and what it gets only with `--tiny`."""

    title: str
    command: tuple[str, ...]
    seconds: float
    writes_files: bool = False
    tiny: tuple[str, ...] = ()


def run(name: str, part: Part, seconds: float, options: argparse.Namespace) -> None:
    """Runs a part with its limit, and prints what it printed."""
    print(f"\n## {part.title}\n", flush=True)
    command = [sys.executable, "-m", *part.command, *(part.tiny if options.tiny else ())]
    if part.writes_files:
        command += ["--output", str(options.output)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
    began, log = time.monotonic(), options.output / f"{name}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, start_new_session=True)
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"none: stopped after its limit of {seconds:.0f} s"
        finally:
            _end(process)
    took = time.monotonic() - began
    if code == 0:
        print(f"\n(`{name}`, {took:.0f} s)", flush=True)
        return
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    print(
        f"\n**`{name}` did not end well**, exit code {code}, {took:.0f} s. Its log ends:\n\n```\n{tail}\n```",
        flush=True,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the part's processes, all of which are in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run_parts(title: str, parts: Mapping[str, Part], description: str | None) -> None:
    """The command line of a measurement that has parts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(parts))
    parser.add_argument("--seconds", type=float, default=560.0, help="for all parts together")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", f"{title}-output")))
    parser.add_argument("--tiny", action="store_true", help="tries the programs without GPUs")
    options = parser.parse_args()
    if options.tiny:
        os.environ["BATON_BENCHMARK_TINY"] = "1"
    options.output.mkdir(parents=True, exist_ok=True)
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(parts)}")
    deadline = time.monotonic() + options.seconds
    print(f"# {title}\n", flush=True)
    for name in chosen:
        left = deadline - time.monotonic()
        if left < 15:
            print(f"\n## {parts[name].title}\n\nNot run: no time was left.", flush=True)
            continue
        if (options.output / "see-both").exists():
            os.environ["BATON_BENCHMARK_SEE_BOTH"] = "1"
        run(name, parts[name], min(parts[name].seconds * (4 if options.tiny else 1), left), options)
