"""The rates of loading and computing: what is worth loading, and what is tried to find that out."""

import random
from collections import defaultdict
from dataclasses import dataclass

import pytest

from services.engines.kv_events import KvTier
from services.engines.pytorch.kv_cache.tiers.jobs import Rates


def test_what_is_sooner_computed_is_not_loaded() -> None:
    rates = Rates(block_bytes=1 << 20, block_tokens=16)
    assert rates.worth_loading(host=10, disk=10) == 20  # nothing is measured yet
    rates.computed(tokens=1600, seconds=1.0)  # 10 ms a block
    rates.loaded(KvTier.HOST, blocks=100, seconds=0.1)
    for _ in range(3):
        rates.loaded(KvTier.DISK, blocks=100, seconds=10.0)
    assert rates.worth_loading(host=10, disk=10) == 10
    rates.loaded(KvTier.DISK, blocks=100, seconds=0.1)
    assert rates.worth_loading(host=10, disk=0) == 10
    for _ in range(20):
        rates.loaded(KvTier.DISK, blocks=100, seconds=0.1)
        rates.loaded(KvTier.HOST, blocks=100, seconds=100.0)
    assert rates.worth_loading(host=10, disk=0) == 0
    assert 0.1 <= rates.patience_seconds(10) <= 0.11


def test_one_load_that_was_held_up_does_not_end_loads_for_good() -> None:
    rates = Rates(block_bytes=1 << 20, block_tokens=16)
    rates.computed(1000, 0.1)
    rates.loaded(KvTier.HOST, 1, 5.0)
    assert rates.worth_loading(10, 0) == 0
    for _ in range(200):
        if rates.worth_loading(10, 0):
            rates.loaded(KvTier.HOST, 10, 0.004)
    assert rates.worth_loading(10, 0) == 10


def _of_a_gpu(load_seconds: float = 0.012) -> Rates:
    """An 8B model: 500 tokens take 14.3 ms, of which any prompt takes 5, and 63 blocks of 4 MiB 5 ms more to load."""
    rates = Rates(4 << 20, 32, step_seconds=0.005, load_seconds=load_seconds)
    for _ in range(4):
        rates.computed(500, 0.0143)
        rates.computed(2000, 0.057)
        rates.computed(32_000, 1.77)
        rates.resumed(KvTier.HOST, blocks=999, tokens=32, seconds=0.005 + 0.012 + 999 * 8e-5)
    return rates


def test_what_any_load_takes_makes_short_prompts_sooner_computed() -> None:
    rates = _of_a_gpu()
    assert rates.worth_loading(host=15, disk=0) == 0
    assert rates.worth_loading(host=62, disk=0) == 62
    assert rates.worth_loading(host=999, disk=0) == 999


def test_what_any_load_takes_is_measured_by_short_loads() -> None:
    rates = _of_a_gpu(load_seconds=0.001)
    assert rates.worth_loading(host=15, disk=0) == 15
    for _ in range(3):
        rates.resumed(KvTier.HOST, blocks=15, tokens=20, seconds=0.018)
    assert rates.worth_loading(host=15, disk=0) == 0
    assert rates.worth_loading(host=999, disk=0) == 999


@pytest.mark.parametrize("seconds", [0.008, 0.016, 0.025, 0.06])
@pytest.mark.parametrize("blocks", [7, 25])
def test_short_loads_that_take_longer_do_not_end_those_of_long_prompts(seconds: float, blocks: int) -> None:
    """Sixteen prompts that come at once are loaded in the same steps as one of them, and say nothing of the link."""
    for seed in range(40):
        chance, rates = random.Random(seed), Rates(4 << 20, 32, step_seconds=0.005, load_seconds=0.0028)
        rates.computed(32_000, 1.49)
        for _ in range(12):
            rates.resumed(KvTier.HOST, 999, 32, chance.uniform(0.24, 0.32))
        for _ in range(128):
            rates.resumed(KvTier.HOST, chance.randint(1, blocks), 32, seconds * chance.uniform(0.7, 1.5))
            assert rates.worth_loading(host=999, disk=0) == 999


@pytest.mark.parametrize("blocks", [1, 4, 15])
def test_trials_take_little_of_the_time_to_compute(blocks: int) -> None:
    rates = _of_a_gpu()
    computing = trials = 0.0
    for _ in range(3000):
        computing += 0.005 + (rates.compute_seconds(blocks) or 0.0)
        loaded = rates.worth_loading(host=blocks, disk=0)
        trials += rates.load_seconds(KvTier.HOST, loaded) - (rates.compute_seconds(loaded) or 0.0)
    assert 0 < trials <= 0.02 * computing


@dataclass
class Link:
    """A GPU as of `_of_a_gpu`, and loads that take it so long beside 80 us a block; all by chance."""

    base_seconds: float
    spread: float
    chance: random.Random

    def computing(self, tokens: int, before: int = 0) -> float:
        return tokens / 40_000 * (1 + (before + tokens / 2) / 30_500)

    def by_chance(self, seconds: float, spread: float) -> float:
        return seconds * self.chance.lognormvariate(-spread * spread / 2, spread)

    def resume(self, rates: Rates, blocks: int) -> tuple[float, float]:
        """The seconds of a prompt of so many known blocks and one that is new, and those to compute it all: on average,
        since what chance adds to either is not the decision's.
        """
        tokens = 32 * (blocks + 1)
        loaded = rates.worth_loading(host=blocks, disk=0)
        rest = tokens - 32 * loaded
        computing = self.computing(rest, 32 * loaded)
        seconds = 0.005 + self.by_chance(computing, 0.1)
        if not loaded:
            rates.computed(tokens, seconds)
            return 0.005 + computing, 0.005 + computing
        loading = self.by_chance(self.base_seconds, self.spread) + 8e-5 * loaded
        rates.resumed(KvTier.HOST, loaded, rest, seconds + loading)
        return 0.005 + computing + self.base_seconds + 8e-5 * loaded, 0.005 + self.computing(tokens)


LENGTHS = (1, 4, 8, 15, 24, 31, 62, 250, 999)


@pytest.mark.parametrize("spread", [0.1, 0.5])
@pytest.mark.parametrize("believed", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("base_seconds", [0.002, 0.005, 0.012, 0.02])
def test_prompts_that_come_back_are_not_slower_than_computed_ones_whatever_a_load_takes(
    base_seconds: float, believed: float, spread: float
) -> None:
    link = Link(base_seconds, spread, random.Random(1))
    rates = Rates(4 << 20, 32, step_seconds=0.005, load_seconds=believed * base_seconds)
    for blocks in LENGTHS:
        rates.computed(32 * blocks, 0.005 + link.computing(32 * blocks))
    took, computing = defaultdict[int, float](float), defaultdict[int, float](float)
    for _ in range(2000):
        blocks = link.chance.choice(LENGTHS)
        seconds, alone = link.resume(rates, blocks)
        took[blocks] += seconds
        computing[blocks] += alone
    assert max(took[blocks] / computing[blocks] for blocks in LENGTHS) <= 1.02
    assert took[250] <= 0.25 * computing[250]
    assert took[999] <= 0.15 * computing[999]


def test_prompts_that_are_all_short_show_how_fast_the_link_is() -> None:
    """A link is taken for ten times slower before it is measured; loads of a block would say little of that."""
    link = Link(0.005, 0.1, random.Random(1))
    rates = Rates(4 << 20, 32, step_seconds=0.005, load_seconds=0.005)
    rates.computed(1024, 0.005 + link.computing(1024))
    for _ in range(40):
        link.resume(rates, 31)
    assert [rates.worth_loading(host=31, disk=0) for _ in range(3)] == [31, 31, 31]
