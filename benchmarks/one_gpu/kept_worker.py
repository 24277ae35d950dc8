"""A worker whose weights are made up, behind a keeper if it keeps memory, as `python -m services` is.

It imports no transformers to start again. With BATON_BENCHMARK_TIMES=1 it prints when each part of its start is done.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.keeper import keeper
from services.keeper.messages import VARIABLE


def _say(what: str) -> None:
    if os.environ.get("BATON_BENCHMARK_TIMES") == "1":
        now = time.time()
        print(f"{now - _started_at():.3f} s, at {now % 1000:.3f}: {what}", file=sys.stderr, flush=True)


@functools.cache
def _started_at() -> float:
    """The time of this process's start, as the kernel says."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def _made_up(folder: Path, config: Any, dtype: Any) -> Any:
    from benchmarks.two_gpus.model import make_weights

    return make_weights(folder, config, dtype)


def _timed(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*arguments: Any, **named: Any) -> Any:
        _say(f"{call.__qualname__} begins")
        result = call(*arguments, **named)
        _say(f"{call.__qualname__} has ended")
        return result

    return timed


def main() -> None:
    """The keeper, or the worker that it has started."""
    if VARIABLE not in os.environ and any(each.startswith("keep_memory") for each in sys.argv):
        # Each kill of a measurement counts as the first.
        keeper._PROVEN_SECONDS = 0.0
        raise SystemExit(keeper.Keeper([sys.executable, "-m", "benchmarks.one_gpu.kept_worker", *sys.argv[1:]]).run())
    _say("the interpreter runs")
    import torch  # noqa: F401 - to time it

    _say("torch is imported")
    from services import __main__ as services
    from services.engines.pytorch import core, parts
    from services.engines.pytorch.model import loading

    _say("the worker is imported")
    loading._read_weights = _made_up
    if os.environ.get("BATON_BENCHMARK_TIMES") == "1":
        _time(services, core, parts)
    services.main()


def _time(services: Any, core: Any, parts: Any) -> None:
    for owner, name in (
        (services, "begin_start"),
        (services, "note_start"),
        (core, "open_parts"),
        (core, "open_vocabulary"),
        (core.EngineCore, "_warm_up"),
        (core.EngineCore, "_open_facts"),
        (parts, "load_kept"),
        (parts, "layout_of"),
        (parts, "_rehearse"),
        (parts, "open_memory"),
        (parts, "_recover"),
        (parts, "open_runner"),
    ):
        setattr(owner, name, _timed(getattr(owner, name)))


if __name__ == "__main__":
    main()
