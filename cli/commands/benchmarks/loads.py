"""The load that the options of `baton bench sweep` and `compare` describe."""

import argparse
from pathlib import Path

from baton.errors import ConfigError
from devtools.bench.steps import Step, sweep
from devtools.bench.workload import Images, Lengths, Workload, read_lengths


def workload_of(arguments: argparse.Namespace) -> Workload:
    """The lengths and the images of requests. Raises ConfigError for a file of lengths that is wrong."""
    pairs = read_lengths(Path(arguments.lengths)) if arguments.lengths else ()
    images = Images(arguments.images, arguments.image_size, arguments.image_repeat)
    return Workload(Lengths(pairs, arguments.input, arguments.output), images)


def steps_of(arguments: argparse.Namespace) -> list[Step]:
    """The steps of a sweep. Raises ConfigError if there is none."""
    if not arguments.rate and not arguments.concurrency:
        raise ConfigError(f"bench {arguments.action}: give --rate, --concurrency or both")
    return sweep(arguments.rate, arguments.concurrency, arguments.requests, arguments.seed)
