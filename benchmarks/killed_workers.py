"""Kills the processes of workers again and again under kept streams: how many fail, differ, or leave blocks behind?

    PYTHONPATH=.:tests .venv/bin/python benchmarks/killed_workers.py [--kills 60] [--seconds 300] [--seed 0]
        [--shape one|apart|images] [--routers] [--streams 6] [--logs FOLDER] [--add-to FILE]

Starts a cluster of processes: one worker for all, one for prompts and one for decodes, or these and one for images.
Each worker has a keeper. One after another they are killed (SIGKILL, SIGSEGV) or stopped (SIGSTOP) at random moments,
some once more while they start; with `--routers` also routers at the same time. Every stream is compared with an
undisturbed one. With `--add-to` the figures are added to those in a file, and the sum is printed. The exit code is 1 if
anything was lost.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from support.cluster.fleet import Fleet, fleet
from support.faults.kept_requests import any_requests, image_requests, paced_requests
from support.faults.killed_workers import Killer, Kills, plan
from support.faults.lost_routers import Report, Streams
from support.servers.etcd import EtcdServer

_TOKENS = 120
_FREE_SECONDS = 60.0


@dataclass(slots=True)
class _Result:
    kills: Kills = field(default_factory=Kills)
    streams: Report = field(default_factory=Report)
    leaked_blocks: int = 0

    @property
    def is_clean(self) -> bool:
        lost = self.streams.failed or self.streams.different or self.leaked_blocks or self.kills.recovered["damaged"]
        return not lost

    def add(self, other: "_Result") -> None:
        self.kills.add(other.kills)
        self.streams.add(other.streams)
        self.leaked_blocks += other.leaked_blocks

    def __str__(self) -> str:
        lines = [str(self.kills), f"{self.streams}; {len(self.streams.refused)} refused before they had begun"]
        lines += [f"failed: {each}" for each in self.streams.failed]
        lines += [f"different: {each}" for each in self.streams.different]
        lines += [f"refused: {each}" for each in self.streams.refused[:3]]
        return "\n".join([*lines, f"{self.leaked_blocks} leaked blocks"])


async def _run(options: argparse.Namespace, etcd: str, folder: Path) -> _Result:
    asked = {**any_requests(_TOKENS), **paced_requests()}
    if options.shape == "images":
        asked |= image_requests()
    async with fleet(plan(f"killed-{options.shape}-{options.seed}", etcd, options.shape), folder) as running:
        routers = [node.direct for node in running.nodes.values() if node.role == "router"]
        streams = Streams(routers, asked, Report(), stall_seconds=30.0)
        await streams.learn()
        killer = Killer(running, streams, options.seed)
        kill = partial(killer.kill, options.kills, routers=options.routers, seconds=options.seconds)
        await streams.run(options.streams, kill)
        return _Result(killer.report, streams.report, await _blocks_left(running))


async def _blocks_left(running: Fleet) -> int:
    """The blocks that are in use although nothing runs, once kept answers had the time to go."""
    ends_at = time.monotonic() + _FREE_SECONDS
    while (used := await running.blocks_used()) and time.monotonic() < ends_at:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    return used


def _summed(result: _Result, file: Path) -> _Result:
    """The sum of the figures in a file and of these, written back."""
    found = json.loads(file.read_text()) if file.exists() else None
    if found is not None:
        result.add(_Result(Kills(**found["kills"]), Report(**found["streams"]), found["leaked_blocks"]))
    file.write_text(json.dumps(asdict(result)))
    return result


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--shape", choices=["one", "apart", "images"], default="apart")
    parser.add_argument("--routers", action="store_true")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--add-to", type=Path)
    return parser.parse_args()


def main() -> int:
    """Prints the figures. 1 if anything was lost."""
    options = _options()
    os.environ["PYTHONPATH"] = f"{Path(__file__).parents[1] / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with TemporaryDirectory() as scratch:
        folder = options.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        etcd = EtcdServer(Path(scratch) / "etcd")
        etcd.start()
        try:
            result = asyncio.run(_run(options, etcd.endpoint, folder))
        finally:
            etcd.stop()
    print(f"{options.shape}, seed {options.seed}: {result}", flush=True)
    if options.add_to is not None:
        print(f"sum: {_summed(result, options.add_to)}")
    return 0 if result.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
