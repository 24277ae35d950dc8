"""Runs seeds: `python -m simulation.embedded --seeds 0:200`. Exit code 1 if one breaks what must hold."""

# Before anything of Baton: its clocks are bound when it is imported.
from simulation import entropy  # isort: skip

import argparse
import sys
from collections import Counter

from simulation.embedded.world import World
from simulation.hashes import fix_hashes


def main() -> None:
    """The command."""
    fix_hashes("simulation.embedded")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST")
    parser.add_argument("--turns", type=int, default=400, help="of each seed")
    options = parser.parse_args()
    first, _, last = options.seeds.partition(":")
    began, counts, failed = entropy.cpu_seconds(), Counter[str](), 0
    for seed in range(int(first), int(last or int(first) + 1)):
        world = World(seed, options.turns)
        world.run(seed)
        counts += world.counts
        failed += bool(world.laws.problems)
        for problem in world.laws.problems[:2]:
            print(f"{seed}: {problem}", flush=True)
    print(f"{failed} seeds failed, {entropy.cpu_seconds() - began:.0f} s of CPU; {dict(sorted(counts.items()))}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
