"""Every order of events of two workers that hold KV for one another: all requests end."""

from collections.abc import Callable

import pytest
from support.engines.crossing import Crossing, CrossingWorld, PyTorchSide, Setting, Side, SimulatedSide
from support.engines.exploration import explore, replay

from services.engines.memory import allocation
from services.engines.memory.allocation import AllocationRules

SHARED = AllocationRules(held_share=0.5)
BOTH = [PyTorchSide, SimulatedSide]
SHORT, HALF, LARGE = 3, 6, 12  # prompts of one, two and three blocks; the last ones need a fourth to decode

Build = Callable[[Setting], Side]


def crossing(*prompt_tokens: int) -> tuple[Crossing, ...]:
    """Requests of these lengths, alternately from either worker to the other."""
    return tuple(Crossing(index % 2, tokens) for index, tokens in enumerate(prompt_tokens))


def check(build: Build, setting: Setting) -> int:
    """Every order of events ends with all requests done and all blocks free."""
    explored = explore(lambda: CrossingWorld(setting, build))
    assert explored.stuck == []
    assert explored.is_finite
    for state in explored.done:
        world = replay(lambda: CrossingWorld(setting, build), explored.paths[state])
        assert isinstance(world, CrossingWorld)
        assert world.used == 0
    return len(explored.paths)


@pytest.fixture(params=[1, allocation.MAX_PASSES], autouse=True, ids=["one-pass", "many-passes"])
def _most_passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one pass, requests that were passed too often occur in small worlds too."""
    monkeypatch.setattr(allocation, "MAX_PASSES", request.param)


@pytest.mark.parametrize("build", BOTH)
def test_the_search_finds_the_circle_where_a_pool_may_be_full_of_held_kv(build: Build) -> None:
    setting = Setting(crossing(HALF, HALF), 2, AllocationRules(held_share=1.0), gives_up=False)
    [first, *_] = explore(lambda: CrossingWorld(setting, build)).stuck
    stuck = replay(lambda: CrossingWorld(setting, build), first)
    assert isinstance(stuck, CrossingWorld)
    assert stuck.phases == ["reserving"] * 2


@pytest.mark.parametrize("lengths", [(HALF, HALF, HALF), (HALF, HALF, SHORT), (SHORT, HALF, HALF)])
@pytest.mark.parametrize("build", BOTH)
def test_prompts_within_the_held_share_all_end_and_none_is_given_up(build: Build, lengths: tuple[int, ...]) -> None:
    assert check(build, Setting(crossing(*lengths), 4, SHARED, gives_up=False)) > 400


@pytest.mark.parametrize("lengths", [(LARGE, LARGE), (LARGE, LARGE, HALF), (LARGE, LARGE, SHORT)])
@pytest.mark.parametrize("build", BOTH)
def test_larger_prompts_all_end_since_their_readers_give_them_up(build: Build, lengths: tuple[int, ...]) -> None:
    assert check(build, Setting(crossing(*lengths), 4, SHARED)) > 70


@pytest.mark.parametrize("build", BOTH)
def test_pools_that_may_be_full_of_held_kv_end_too_since_readers_give_up(build: Build) -> None:
    assert check(build, Setting(crossing(HALF, HALF, HALF), 2, AllocationRules(held_share=1.0))) > 500


@pytest.mark.parametrize("build", BOTH)
def test_requests_that_are_cancelled_anywhere_hold_up_no_other(build: Build) -> None:
    assert check(build, Setting(crossing(LARGE, LARGE, SHORT), 4, SHARED, cancels=True)) > 500


@pytest.mark.slow
@pytest.mark.parametrize("build", BOTH)
def test_four_requests_that_fill_both_pools_all_end(build: Build) -> None:
    assert check(build, Setting(crossing(HALF, HALF, HALF, HALF), 4, SHARED, gives_up=False)) > 4000
