"""Short prompts that are computed, and that come back, in turns: the ratio of each two neighbours, and its median."""

import asyncio
import statistics
from collections.abc import Sequence
from itertools import count

from benchmarks.gpu_transfer import TINY
from benchmarks.tiers.engines import BLOCK_TOKENS, first_token, prompt
from benchmarks.two_gpus.report import say
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine import PyTorchEngine

_PAIRS = 4 if TINY else 100
_LENGTHS = (2 * BLOCK_TOKENS,) if TINY else (500, 1000)


async def measure_pairs(engine: PyTorchEngine) -> None:
    """Prints for each length the median of the ratios, the interval that has it with 95 %, and both medians in ms."""
    seeds = count(1_000_000)
    for length in _LENGTHS:
        asked = prompt(length, next(seeds))
        await first_token(engine, asked)
        pairs, loaded = list[tuple[float, float]](), 0
        for number in range(_PAIRS):
            found = dict[str, float]()
            for what in ("compute", "resume")[:: 1 if number % 2 else -1]:
                await _evict(engine)
                taken, _, cached = await first_token(engine, asked if what == "resume" else prompt(length, next(seeds)))
                found[what] = taken
                loaded += what == "resume" and cached > 0
            pairs.append((found["compute"], found["resume"]))
        ratios = sorted(resumed / computed for computed, resumed in pairs)
        computed, resumed = (statistics.median(each) * 1e3 for each in zip(*pairs, strict=True))
        say(
            "resume in pairs",
            tokens=length,
            pairs=_PAIRS,
            ratio=statistics.median(ratios),
            interval=_interval(ratios),
            mean=statistics.fmean(ratios),
            compute_ms=computed,
            resume_ms=resumed,
            loaded=f"{loaded} of {_PAIRS}",
        )


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with a probability of 95 %."""
    half = 0.98 * len(ratios) ** 0.5
    low = max(0, int(len(ratios) / 2 - half))
    return ratios[low], ratios[-1 - low]


async def _evict(engine: PyTorchEngine) -> None:
    """Lets all leave the pool, and waits until it is in host memory."""

    def run(core: EngineCore) -> None:
        core._pool.release(blocks := core._pool.allocate(core._pool.available))
        assert core.tiers is not None
        core.tiers.settle(blocks)

    await engine._loop.call(run)
    await asyncio.sleep(0.01)
