"""Workers whose KV layout or transports fit no other worker: the router reports them."""

import re
from contextlib import aclosing
from dataclasses import replace

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st
from support.clients.scraping import sample
from support.cluster.in_process import PREFILL, Bench, bench, eventually, simulated
from support.router.worker_views import worker

from baton.inference.v1 import generate_pb2
from discovery.memory import MemoryRegistry
from discovery.pairing import NOT_CHECKABLE, Unpaired, can_hand_over, partly_unpaired, unpaired
from discovery.record import CHECKS_HANDOFFS, DIGESTS_HANDOFFS, WorkerRecord
from services.config import HandoffConfig
from services.server import host_worker

OTHER = simulated("d1", "decode", block_tokens=32)
BY_SHM = simulated("p1", "prefill").model_copy(update={"transports": ("shm",)})
BY_TCP = simulated("d1", "decode").model_copy(update={"transports": ("tcp",)})

_TRANSPORTS = st.none() | st.sets(st.sampled_from(["shm", "tcp", "nixl"])).map(tuple)
_RECORDS = st.builds(
    lambda role, layout, offers, reads, able: replace(
        worker("w"), roles=(role,), layout_digest=layout, offers=offers, reads=reads, capabilities=tuple(able)
    ),
    *(st.sampled_from(["prefill", "decode"]), st.sampled_from("xy"), _TRANSPORTS, _TRANSPORTS),
    st.sets(st.sampled_from([CHECKS_HANDOFFS, DIGESTS_HANDOFFS])),
)
_FLEETS = st.lists(_RECORDS, max_size=6).map(
    lambda records: [replace(record, worker_id=f"w{index}") for index, record in enumerate(records)]
)


def problems(running: Bench) -> dict[str, str]:
    return {one.record.worker_id: one.unpaired for one in running.cluster.workers}


async def test_both_sides_of_a_pair_that_cannot_be_are_named_with_both_layouts() -> None:
    async with bench(PREFILL, OTHER) as running:
        found = {one.worker_id: one.problem for one in await running.list_workers()}
        assert re.search(r"fits no prefill worker: p1 has \w{12} \(.*16 tokens a block", found["d1"])
        assert "32 tokens a block" in found["d1"]
        assert re.search(r"fits no decode worker: d1 has \w{12} \(.*32 tokens a block", found["p1"])
        assert sample("baton_router_unpaired_workers", worker_role="decode") == 1
        assert sample("baton_router_unpaired_workers", worker_role="prefill") == 1
        # It is a warning: what they can do without one another they do.
        assert len((await running.generate(prompt="hello", stopping={"max_tokens": 3})).token_ids) == 3


async def test_a_worker_that_finds_a_partner_has_no_problem_any_more() -> None:
    async with bench(PREFILL, OTHER) as running:
        await running.start(simulated("p2", "prefill", block_tokens=32))
        await eventually(lambda: problems(running).get("p2") == problems(running)["d1"] == "")
        assert problems(running)["p1"]
        await running.start(simulated("d2", "decode"))
        await eventually(lambda: not any(problems(running).values()))
        assert sample("baton_router_unpaired_workers", worker_role="prefill") == 0


async def test_equal_layouts_are_no_problem(pair: Bench) -> None:
    assert {one.worker_id: one.problem for one in await pair.list_workers()} == {"p1": "", "d1": ""}


def test_only_workers_that_should_hand_over_are_compared() -> None:
    alone = replace(worker("a"), roles=("decode",), layout_digest="x")
    assert not unpaired([alone])
    assert not unpaired([alone, replace(worker("b"), roles=("decode",), layout_digest="y")])
    assert not unpaired([alone, replace(worker("b"), roles=("encode",), layout_digest="y")])
    assert not unpaired([alone, replace(worker("b"), roles=("prefill",), layout_digest="y", model="another")])
    assert not unpaired([alone, replace(worker("b"), roles=("prefill",), layout_digest="y", draining=True)])
    whole = replace(alone, capabilities=("whole_requests",))
    assert not unpaired([whole, replace(worker("b"), roles=("prefill",), layout_digest="y")])
    assert unpaired([alone, replace(worker("b"), roles=("prefill",), layout_digest="y")]).keys() == {"a@1", "b@1"}


def test_workers_of_both_roles_that_differ_are_both_named() -> None:
    records = [replace(worker(name), layout_digest=name) for name in "ab"]
    assert unpaired(records).keys() == {"a@1", "b@1"}


def test_a_message_does_not_grow_with_the_fleet() -> None:
    many = [replace(worker(f"p{number}"), roles=("prefill",), layout_digest="y") for number in range(500)]
    found = unpaired([replace(worker("a"), roles=("decode",), layout_digest="x"), *many])["a@1"]
    assert found.problem.endswith("and 497 more")


async def test_both_sides_without_a_common_transport_are_named_with_their_transports(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with bench(BY_SHM, BY_TCP) as running:
        listed = {one.worker_id: one for one in await running.list_workers()}
        assert listed["p1"].problem == "no transport in common with any decode worker: it offers shm; d1 reads tcp"
        assert listed["d1"].problem == "no transport in common with any prefill worker: it reads tcp; p1 offers shm"
        assert list(listed["p1"].transports.offers) == ["shm"]
        assert list(listed["d1"].transports.reads) == ["tcp"]
        assert sample("baton_router_unpaired_workers", worker_role="decode") == 1
        said = capsys.readouterr()
        assert "NO_COMMON_TRANSPORT" in said.out + said.err
        await running.start(BY_TCP.model_copy(update={"worker_id": "p2", "roles": ("prefill",)}))
        await eventually(lambda: problems(running).get("p2") == problems(running)["d1"] == "")
        assert problems(running)["p1"]


@given(_FLEETS)
def test_a_worker_is_unpaired_exactly_if_it_can_hand_over_to_none_and_from_none(records: list[WorkerRecord]) -> None:
    prefills = [record for record in records if record.roles == ("prefill",)]
    decodes = [record for record in records if record.roles == ("decode",)]
    alone = {one.process for one in prefills if decodes and not any(can_hand_over(one, other) for other in decodes)}
    alone |= {one.process for one in decodes if prefills and not any(can_hand_over(other, one) for other in prefills)}
    assert unpaired(records).keys() == alone


def test_who_checks_handoffs_is_no_pair_with_an_owner_of_an_earlier_version() -> None:
    old = replace(worker("p1"), roles=("prefill",), layout_digest="x")
    new = replace(old, worker_id="p2", capabilities=(DIGESTS_HANDOFFS,))
    reader = replace(worker("d1"), roles=("decode",), layout_digest="x", capabilities=(CHECKS_HANDOFFS,))
    assert not can_hand_over(old, reader)
    assert can_hand_over(new, reader)
    assert can_hand_over(old, replace(reader, capabilities=()))
    why = "d1 checks handoffs (handoff.verify), and p1, of an earlier version, cannot digest what it holds"
    assert unpaired([old, reader]) == dict.fromkeys(("p1@1", "d1@1"), Unpaired(NOT_CHECKABLE, why))
    partly = partly_unpaired([old, new, reader])
    assert unpaired([old, new, reader]).keys() == {"p1@1"}
    assert list(partly) == ["d1@1"]
    assert why in partly["d1@1"][0]


async def test_a_worker_that_checks_handoffs_is_handed_none_by_an_owner_of_an_earlier_version() -> None:
    checking = simulated("d1", "decode").model_copy(update={"handoff": HandoffConfig(verify="always")})
    elsewhere = MemoryRegistry("test")
    async with bench(checking) as running, host_worker(PREFILL, elsewhere), aclosing(elsewhere.watch()) as views:
        [new] = await anext(views)
        old = replace(new, capabilities=tuple(each for each in new.capabilities if each != DIGESTS_HANDOFFS))
        async with running.registry.register(old) as registration:
            await running.ready(2)
            with pytest.raises(aio.AioRpcError, match="cannot digest what it holds, and d1 checks handoffs"):
                await running.generate(prompt="hello", routing={"topology": "TOPOLOGY_DISAGGREGATED"})
            assert (await running.generate(prompt="hello")).started.topology == generate_pb2.TOPOLOGY_AGGREGATED
            await registration.update(new)
            await eventually(lambda: not any(problems(running).values()))
            handed = await running.generate(prompt="hello", routing={"topology": "TOPOLOGY_DISAGGREGATED"})
            assert handed.started.prefill_worker_id == "p1"
