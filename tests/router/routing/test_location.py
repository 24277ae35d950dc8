"""Zone, rack and host of workers: bounds on handoffs, and the preference for near pairs."""

from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cluster.in_process import FAST_ROUTER, Bench, bench, eventually, simulated
from support.router.worker_views import worker

from baton.inference.v1 import cluster_service_pb2, generate_pb2
from discovery.pairing import can_hand_over, partly_unpaired, unpaired
from discovery.record import DOMAINS, Location, WorkerRecord, is_within, nearness, steps_apart
from router.config import RouterConfig, RoutingConfig
from services.config import LocationConfig, WorkerConfig

_LABELS = st.sampled_from(["", "a", "b"])
_LOCATIONS = st.builds(Location, _LABELS, _LABELS, _LABELS)
DISAGGREGATED = generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED)


def at(worker_id: str, role: str, zone: str = "", rack: str = "", host: str = "") -> WorkerConfig:
    location = LocationConfig(zone=zone, rack=rack, host=host)
    return simulated(worker_id, role).model_copy(update={"location": location})


def router(**routing: object) -> RouterConfig:
    return FAST_ROUTER.model_copy(update={"routing": RoutingConfig.model_validate(routing)})


async def explained(running: Bench) -> cluster_service_pb2.ExplainRouteResponse:
    request = generate_pb2.GenerateRequest(prompt="hello")
    return await running.operators.ExplainRoute(cluster_service_pb2.ExplainRouteRequest(request=request))


@given(_LOCATIONS, _LOCATIONS)
def test_who_shares_a_rack_shares_no_more_than_the_labels_say(one: Location, other: Location) -> None:
    assert nearness(one, other) == nearness(other, one)
    found = nearness(one, other)
    assert steps_apart(one, other) == (len(DOMAINS) - 1 - DOMAINS.index(found) if found else 3)
    for domain in DOMAINS:
        label = getattr(one, domain)
        known = bool(label) and label == getattr(other, domain)
        above = DOMAINS[: DOMAINS.index(domain)]
        assert is_within(domain, one, other) == (known and all(getattr(one, a) == getattr(other, a) for a in above))


def test_a_record_keeps_its_location_and_an_older_one_has_none() -> None:
    record = replace(worker("a"), location=Location("z", "r", "h"))
    assert WorkerRecord.from_json(record.to_json()).location == Location("z", "r", "h")
    older = record.to_json().replace(b',"location":{"zone":"z","rack":"r","host":"h"}', b"")
    assert b"location" not in older
    assert WorkerRecord.from_json(older).location == Location()
    for wrong in (b"3", b'{"zone":7}', b'{"rack":"a b"}', b'{"host":"' + b"x" * 300 + b'"}'):
        with pytest.raises(ValueError, match=r"location|zone|rack|host"):
            WorkerRecord.from_json(record.to_json().replace(b'{"zone":"z","rack":"r","host":"h"}', wrong))


@pytest.mark.parametrize("policy", ["automatic", "predicted_seconds", "least_loaded", "round_robin", "random"])
async def test_no_policy_makes_a_pair_across_the_bound(policy: str) -> None:
    workers = [at("pa", "prefill", "a"), at("pb", "prefill", "b"), at("da", "decode", "a"), at("px", "prefill")]
    async with bench(*workers, router=router(policy=policy, handoff_within="zone")) as running:
        for _ in range(6):
            answer = await running.generate(prompt="hello", stopping={"max_tokens": 2}, routing=DISAGGREGATED)
            assert {one.worker_id for one in answer.finished.timings} - {""} == {"pa", "da"}
        said = list((await explained(running)).workers)
        listed = {one.worker_id: one for one in await running.list_workers()}
    apart = "is at zone b, host 127.0.0.1, not in the zone of da (zone a, host 127.0.0.1)"
    assert f"prefill pb for decode da: {apart}, which handoffs must not leave" in said
    assert listed["pb"].problem.startswith("no decode worker is in its zone, which handoffs must not leave")
    assert "it is at zone b" in listed["pb"].problem
    assert listed["da"].pairing_problems[0].startswith("cannot be handed over to by pb (at zone b")
    assert (listed["pa"].location.zone, listed["px"].location.zone) == ("a", "")


async def test_a_request_for_a_pair_says_why_none_is_left() -> None:
    workers = [at("pb", "prefill", "b"), at("da", "decode", "a")]
    async with bench(*workers, router=router(handoff_within="zone")) as running:
        await eventually(lambda: all(one.unpaired for one in running.cluster.workers))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.generate(prompt="hello", stopping={"max_tokens": 2}, routing=DISAGGREGATED)
        whole = await running.generate(prompt="hello", stopping={"max_tokens": 2})
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "which handoffs must not leave" in str(refused.value.details())
    assert whole.finished.topology == generate_pb2.TOPOLOGY_AGGREGATED


@pytest.mark.parametrize("policy", ["predicted_seconds", "least_loaded"])
async def test_near_pairs_are_preferred_when_told(policy: str) -> None:
    workers = [
        *(at("d", "decode", "a", "r1", "h1"), at("other-zone", "prefill", "b", "r1", "h1")),
        *(at("same-zone", "prefill", "a", "r2", "h3"), at("same-rack", "prefill", "a", "r1", "h2")),
    ]
    config = router(policy=policy, far_seconds=0.5)
    async with bench(*workers, router=config) as running:
        for nearest, label in (("same-rack", "rack"), ("same-host", "host")):
            if nearest == "same-host":
                await running.start(at("same-host", "prefill", "a", "r1", "h1"))
                await running.ready(5)
            for _ in range(4):
                answer = await running.generate(prompt="hello", stopping={"max_tokens": 2}, routing=DISAGGREGATED)
                assert nearest in {one.worker_id for one in answer.finished.timings}
            if policy == "predicted_seconds":
                pairs = [one for one in (await explained(running)).candidates if one.prefill_worker_id == nearest]
                steps = {"host": 0, "rack": 1}[label]
                assert (pairs[0].nearness, pairs[0].distance_seconds) == (label, steps * 0.5)


def test_unpaired_agrees_with_can_hand_over_within_a_bound() -> None:
    places = [Location(zone, rack, host) for zone in ("", "a") for rack in ("", "r") for host in ("", "h")]
    prefills = [replace(worker(f"p{n}"), roles=("prefill",), location=place) for n, place in enumerate(places)]
    decodes = [replace(worker(f"d{n}"), roles=("decode",), location=places[-1 - n]) for n in range(3)]
    for within in (None, *DOMAINS):
        alone = {one.process for one in prefills if not any(can_hand_over(one, other, within) for other in decodes)}
        alone |= {one.process for one in decodes if not any(can_hand_over(other, one, within) for other in prefills)}
        assert unpaired([*prefills, *decodes], within).keys() == alone
        parts = partly_unpaired([*prefills, *decodes], within)
        for one in [*prefills, *decodes]:
            others = decodes if "prefill" in one.roles else prefills
            pairs = [(one, other) if others is decodes else (other, one) for other in others]
            fits_all = all(can_hand_over(*pair, within) for pair in pairs)
            assert (one.process in parts) == (not fits_all and one.process not in alone)


def test_a_worker_without_a_partner_says_so_and_part_of_a_fleet_that_differs_is_named() -> None:
    lone = replace(worker("p"), roles=("prefill",))
    assert partly_unpaired([lone]) == {lone.process: ["no worker of demo has the role decode"]}
    # A worker that decodes, or does both, needs no other.
    assert partly_unpaired([replace(lone, roles=("decode",))]) == partly_unpaired([worker("both")]) == {}
    fits = replace(worker("d1"), roles=("decode",))
    differs = replace(fits, worker_id="d2", layout_digest="x")
    [said] = partly_unpaired([lone, fits, differs])[lone.process]
    assert said.startswith("cannot hand over to d2 (KV layout x")


@pytest.mark.parametrize("label", ["a b", "x" * 300, "é", "a\n"])
def test_a_label_that_is_none_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="zone"):
        LocationConfig(zone=label)


def test_the_pairs_of_a_large_fleet_are_found() -> None:
    prefills = [replace(worker(f"p{n}"), roles=("prefill",), location=Location(f"z{n % 3}")) for n in range(1000)]
    decodes = [replace(one, worker_id=f"d{n}", roles=("decode",)) for n, one in enumerate(prefills)]
    found = partly_unpaired([*prefills, *decodes], "zone")
    assert len(found) == 2000
    assert found["p0@1"][0].endswith("and 663 more")
