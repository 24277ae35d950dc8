"""Loans of workers from their prefix caches: under leases, with seals, and refused by the field."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from support.cluster.workers import Running, Starter
from support.servers.prefix_loans import (
    BLOCK_TOKENS,
    FULL,
    LONG,
    Change,
    between,
    compute,
    hashes,
    lend,
    nothing_is_left,
    prefill_from,
    source,
)

from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc
from baton.errors import InvalidRequest, LayoutMismatch, StaleEpoch
from rpc.health import Health
from rpc.server import Service, serve
from services.engines.kv import KvLayout
from services.engines.seals import BlockContents, DamagedBlock, Sealer


async def test_lent_blocks_are_not_evicted_until_they_are_released(start: Starter) -> None:
    async with start("prefill", num_blocks=32) as lender:
        await compute(lender)
        loan = await lend(lender, hashes(LONG))
        before = [bytes(view) for view in lender.worker.engine.memory.read(loan.block_ids)]
        for number in range(6):
            await compute(lender, bytes([number]) * 150)
        assert [bytes(view) for view in lender.worker.engine.memory.read(loan.block_ids)] == before
        assert lender.blocks_held == FULL
        await lender.calls.release(handoff_pb2.KvHandoff(handoff_id=loan.handoff_id, epoch=lender.worker.epoch))
        assert lender.blocks_used == 0


async def test_seals_name_what_was_lent(prefill: Running) -> None:
    await compute(prefill)
    loan = await lend(prefill, hashes(LONG))
    engine = prefill.worker.engine
    digests = engine.digest(loan.block_ids)
    sealer = Sealer(engine.facts.layout, prefill.worker.epoch)
    for seal, name, digest in zip(loan.seals, hashes(LONG), digests, strict=True):
        sealer.check(seal, BlockContents(name, BLOCK_TOKENS), digest)
        for wrong in (BlockContents(name[::-1], BLOCK_TOKENS), BlockContents(name, BLOCK_TOKENS - 1)):
            with pytest.raises(DamagedBlock):
                sealer.check(seal, wrong, digest)
        with pytest.raises(DamagedBlock):
            Sealer(engine.facts.layout, prefill.worker.epoch + 1).check(seal, BlockContents(name, 16), digest)


def _sealed_by(lender: Running, epoch: int = 0, layout: KvLayout | None = None) -> Change:
    """Seals as of another process, or of another layout."""
    engine = lender.worker.engine

    def seal(loan: handoff_pb2.LendPrefixResponse) -> None:
        sealer = Sealer(layout or engine.facts.layout, epoch or lender.worker.epoch)
        digests = engine.digest(loan.block_ids)
        names = [BlockContents(name, BLOCK_TOKENS) for name in hashes(LONG)]
        loan.seals[:] = [sealer.seal(name, digest) for name, digest in zip(names, digests, strict=True)]

    return seal


CHANGES: dict[str, Callable[[Running], Change]] = {
    "another epoch": lambda lender: _sealed_by(lender, epoch=lender.worker.epoch + 1),
    "another model": lambda lender: _sealed_by(lender, layout=replace(lender.worker.engine.facts.layout, model="x")),
    "another layout": lambda lender: _sealed_by(lender, layout=replace(lender.worker.engine.facts.layout, kv_heads=9)),
    "seals in another order": lambda _: lambda loan: loan.seals.reverse(),
    "blocks in another order": lambda _: lambda loan: loan.block_ids.reverse(),
    "blocks that do not exist": lambda _: lambda loan: loan.block_ids.__setitem__(0, 10**6),
    "a block twice": lambda _: lambda loan: loan.block_ids.__setitem__(1, loan.block_ids[0]),
    "a torn seal": lambda _: lambda loan: loan.seals.__setitem__(0, loan.seals[0][:40]),
    "a seal that is too long": lambda _: lambda loan: loan.seals.__setitem__(0, loan.seals[0] + b"x"),
    "too few seals": lambda _: lambda loan: loan.seals.pop(),
    "too many blocks": lambda _: lambda loan: (loan.block_ids.append(63), loan.seals.append(b"x" * 64)),
    "no blocks": lambda _: lambda loan: (loan.block_ids.clear(), loan.seals.clear()),
    "no lease": lambda _: lambda loan: loan.lease.Clear(),
    "another lease": lambda _: lambda loan: loan.MergeFrom(handoff_pb2.LendPrefixResponse(handoff_id="y" * 32)),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_lender_that_answers_wrong_changes_no_token(start: Starter, change: str) -> None:
    async with start("prefill") as lender, start("prefill") as borrower:
        first = await compute(lender)
        async with between(lender, CHANGES[change](lender)) as address:
            response = await prefill_from(borrower, source(lender, address=address))
        assert response.handoff.first_token.token_id == first
        assert response.handoff.usage.cached_tokens in (0, FULL * BLOCK_TOKENS if change == "no lease" else 0)
        lender.let_a_lease_pass()  # of one whose name the borrower was not told
        await nothing_is_left(lender, borrower)


async def test_a_lender_of_an_earlier_version_lends_nothing(start: Starter) -> None:
    async with start("prefill") as lender, start("prefill") as borrower:
        first = await compute(lender)
        add = handoff_pb2_grpc.add_HandoffServiceServicer_to_server
        old = Service("baton.engine.v1.HandoffService", add, handoff_pb2_grpc.HandoffServiceServicer())
        async with serve("127.0.0.1:0", [old], health=Health(), drain_seconds=0) as server:
            response = await prefill_from(borrower, source(lender, address=server.address))
        assert response.handoff.first_token.token_id == first
        await nothing_is_left(lender, borrower)


async def test_wrong_requests_for_a_loan_name_the_field(prefill: Running) -> None:
    with pytest.raises(InvalidRequest, match="block_hashes"):
        await lend(prefill, [])
    with pytest.raises(InvalidRequest, match=r"block_hashes\[1\]"):
        await lend(prefill, [b"x" * 16, b"short"])
    with pytest.raises(StaleEpoch):
        await lend(prefill, hashes(LONG), epoch=3)
    with pytest.raises(LayoutMismatch):
        await lend(prefill, hashes(LONG), layout_digest="0" * 64)
    with pytest.raises(InvalidRequest, match="data_parallel_rank"):
        await lend(prefill, hashes(LONG), data_parallel_rank=1)


@pytest.fixture
def start() -> Starter:
    """Workers that take fault plans."""
    return Starter(allow_faults=True)


@pytest.fixture
async def prefill(start: Starter) -> AsyncIterator[Running]:
    async with start("prefill") as running:
        yield running
