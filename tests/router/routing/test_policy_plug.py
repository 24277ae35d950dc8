"""The routing policy is a plug: built-in ones by name, others by entry point or module:Class."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster.in_process import FAST_ROUTER, bench, simulated
from support.eventually import eventually

from baton.errors import ConfigError
from baton.inference.v1 import generate_pb2
from router.config import RouterConfig, RoutingConfig
from router.routing.policies import LeastLoaded, RandomChoice, RoundRobin, load_policy
from router.routing.prefix.predicted import PredictedSeconds
from router.telemetry import metrics

EXAMPLES = Path(__file__).parents[3] / "examples" / "extending"
PLUG = "sticky_policy:FirstTokens"
ENTRY_POINT = "[baton.policies]\nfirst-tokens = sticky_policy:FirstTokens\nbroken = sticky_policy:Missing\n"


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example can be imported, as a module that is installed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("sticky_policy", None)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that brings the example as an entry point."""
    metadata = tmp_path / "sticky_policy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sticky-policy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    monkeypatch.syspath_prepend(str(tmp_path))


def router(policy: str, **options: int) -> RouterConfig:
    routing = RoutingConfig(policy=policy, policy_options=options)
    return FAST_ROUTER.model_copy(update={"routing": routing})


async def placements(policy: str, prompts: list[str], **options: int) -> list[tuple[str, str]]:
    """The workers of each prompt, on a cluster of two prefill and three decode workers."""
    workers = [simulated(f"p{number}", "prefill") for number in range(2)]
    workers += [simulated(f"d{number}", "decode") for number in range(3)]
    async with bench(*workers, router=router(policy, **options)) as running:
        return [(await running.generate(prompt=each, stopping={"max_tokens": 2})).placed for each in prompts]


async def test_a_policy_from_outside_places_requests() -> None:
    prompts = [f"{number} and so on" for number in range(8)]
    first = await placements(PLUG, [*prompts, *prompts])
    assert first[:8] == first[8:]
    assert len(set(first)) > 2


async def test_its_options_come_from_the_configuration() -> None:
    # All prompts begin with the same token.
    placed = await placements(PLUG, [f"x{number}" for number in range(6)], tokens=1)
    assert len(set(placed)) == 1


async def test_round_robin_uses_one_worker_after_the_other() -> None:
    placed = await placements("round_robin", ["x"] * 6)
    assert [decode for _, decode in placed[:3]] == [decode for _, decode in placed[3:]]
    assert len({decode for _, decode in placed}) == 3


async def test_random_workers_answer() -> None:
    assert all(prefill and decode for prefill, decode in await placements("random", ["x"] * 3))


def test_the_default_is_automatic() -> None:
    assert RoutingConfig().policy == "automatic"
    assert isinstance(load_policy(RoutingConfig()), PredictedSeconds)
    assert isinstance(load_policy(RoutingConfig(policy="least_loaded")), LeastLoaded)
    assert isinstance(load_policy(RoutingConfig(policy="predicted_seconds")), PredictedSeconds)
    assert isinstance(load_policy(RoutingConfig(policy="round_robin")), RoundRobin)
    assert isinstance(load_policy(RoutingConfig(policy="random")), RandomChoice)


@pytest.mark.usefixtures("installed")
def test_an_installed_distribution_brings_a_policy_by_its_entry_point() -> None:
    assert type(load_policy(RoutingConfig(policy="first-tokens"))).__name__ == "FirstTokens"


@pytest.mark.usefixtures("installed")
def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        load_policy(RoutingConfig(policy="least_laden"))
    assert refused.value.message == (
        "routing.policy: unknown policy 'least_laden'; expected one of "
        "automatic, least_loaded, predicted_seconds, round_robin, random, broken, first-tokens, or module:Class"
    )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["nowhere:Policy", "sticky_policy:Missing", "sticky_policy:sha257", "broken", "a:"])
def test_a_policy_that_cannot_be_loaded_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"routing.policy.*{name}"):
        load_policy(RoutingConfig(policy=name))


@pytest.mark.parametrize("name", ["least_loaded", PLUG])
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"routing.policy_options.*colour"):
        load_policy(RoutingConfig(policy=name, policy_options={"colour": "red"}))


@pytest.mark.parametrize(("kv_events", "expected"), [(True, "reported"), (False, "estimated")])
async def test_by_default_caches_are_reported_or_else_estimated_and_the_router_says_which(
    kv_events: bool, expected: str
) -> None:
    workers = (simulated("p", "prefill", kv_events=kv_events), simulated("d", "decode", kv_events=kv_events))
    default = FAST_ROUTER.model_copy(update={"routing": RoutingConfig()})
    async with bench(*workers, router=default) as running:
        await eventually(lambda: running.report()["cache_views"] == {"p": expected, "d": expected})
        listed = [worker.cache_view for worker in await running.list_workers()]
        placed = (await running.generate(prompt="x", stopping={"max_tokens": 2})).started.cache_view
        assert {metrics.CACHE_VIEWS[view] for view in (*listed, placed)} == {expected}


async def test_by_default_a_prompt_goes_where_its_prefix_was_sent_before() -> None:
    engine: dict[str, object] = {"kv_events": False, "prefill_tokens_per_second": 10_000.0}
    workers = [simulated(f"d{number}", "decode", **engine) for number in range(3)]
    prompts = [f"{number} " + "x" * 600 for number in range(6)]
    default = FAST_ROUTER.model_copy(update={"routing": RoutingConfig()})
    async with bench(*workers, router=default) as running:
        first = [(await running.generate(prompt=each, stopping={"max_tokens": 2})).placed for each in prompts]
        again = [(await running.generate(prompt=each, stopping={"max_tokens": 2})).placed for each in prompts]
        assert len({decode for _, decode in first}) == 3
        assert again == first


async def test_predictions_without_reports_are_called_estimates() -> None:
    workers = (simulated("p", "prefill", kv_events=False), simulated("d", "decode", kv_events=False))
    async with bench(*workers, router=router("predicted_seconds")) as running:
        before = metrics.PLACEMENTS.labels("estimated").value
        answer = await running.generate(prompt="x", stopping={"max_tokens": 2})
        assert answer.started.cache_view == generate_pb2.CACHE_VIEW_ESTIMATED
        assert metrics.PLACEMENTS.labels("estimated").value == before + 1
        assert {worker.cache_view for worker in await running.list_workers()} == {generate_pb2.CACHE_VIEW_ESTIMATED}
