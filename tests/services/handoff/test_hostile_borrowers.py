"""Loans of prefixes asked for by a borrower that means harm, or is broken: bounded, and the lender stays responsive."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
from support.clients.worker_calls import decode_request, prompt, sampling
from support.clock import ManualClock
from support.cluster.workers import Running, Starter
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import unary
from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc, prefill_pb2
from baton.errors import InvalidRequest, Overloaded, Unsupported
from engine_protocol.prefix_hash import block_hashes
from rpc.health import Health
from rpc.server import Service, serve
from services.config import HandoffConfig
from services.engines.seals import BlockContents, Sealer
from services.engines.simulated.engine import SimulatedEngine
from services.handoff.lending import MOST_BLOCKS, MOST_LOANS

BLOCK_TOKENS = 16
LONG = bytes(range(200))
HASHES = block_hashes(LONG, BLOCK_TOKENS)


async def lend(lender: Running, names: Sequence[bytes] = HASHES) -> handoff_pb2.LendPrefixResponse:
    worker = lender.worker
    request = handoff_pb2.LendPrefixRequest(
        epoch=worker.epoch, layout_digest=worker.engine.facts.layout.digest, block_hashes=names
    )
    response: handoff_pb2.LendPrefixResponse = await unary(
        lender.calls.handoffs.LendPrefix(request, timeout=PATIENCE_SECONDS)
    )
    return response


async def release(lender: Running, loan: handoff_pb2.LendPrefixResponse) -> None:
    await lender.calls.release(handoff_pb2.KvHandoff(handoff_id=loan.handoff_id, epoch=lender.worker.epoch))


@pytest.fixture
async def lender(start: Starter) -> AsyncIterator[Running]:
    async with start("prefill") as running:
        await running.calls.release(await running.calls.prefill(text=LONG))
        yield running


async def test_a_hash_that_is_given_twice_is_refused(lender: Running) -> None:
    with pytest.raises(InvalidRequest, match=r"block_hashes\[12\].*twice"):
        await lend(lender, [*HASHES, *HASHES])
    with pytest.raises(InvalidRequest, match=r"block_hashes\[1\].*twice"):
        await lend(lender, [HASHES[0]] * MOST_BLOCKS)
    assert lender.blocks_used == 0


async def test_the_most_blocks_fit_into_a_message(lender: Running) -> None:
    names = [number.to_bytes(16, "big") for number in range(MOST_BLOCKS)]
    assert not (await lend(lender, names)).handoff_id
    with pytest.raises(InvalidRequest, match=f"1 to {MOST_BLOCKS}"):
        await lend(lender, [*names, b"x" * 16])


async def test_only_so_many_loans_are_held_at_once(lender: Running) -> None:
    loans = [await lend(lender) for _ in range(MOST_LOANS)]
    with pytest.raises(Overloaded, match=f"{MOST_LOANS} loans"):
        await lend(lender)
    await release(lender, loans[0])
    assert (await lend(lender)).handoff_id
    assert len(lender.worker.leases) == MOST_LOANS
    lender.let_a_lease_pass()
    await eventually(lambda: lender.blocks_used == len(lender.worker.leases) == 0)


async def test_of_loans_that_are_given_up_only_so_many_are_digested_at_once(
    lender: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, may_end, digest = [0, 0], threading.Event(), SimulatedEngine.digest

    def slowly(engine: SimulatedEngine, block_ids: Sequence[int]) -> list[int]:
        running[0] += 1
        running[1] = max(running)
        may_end.wait(PATIENCE_SECONDS)
        running[0] -= 1
        return digest(engine, block_ids)

    monkeypatch.setattr(SimulatedEngine, "digest", slowly)
    for _ in range(3):
        asked = [asyncio.ensure_future(lend(lender)) for _ in range(8)]
        await eventually(lambda: running[0] >= 2)
        for call in asked:
            call.cancel()
        await asyncio.wait(asked)
    # A call that comes after those has passed them on their way in.
    await unary(lender.calls.handoffs.List(handoff_pb2.ListRequest(), timeout=PATIENCE_SECONDS))
    may_end.set()
    await eventually(lambda: lender.blocks_used == len(lender.worker.leases) == 0)
    assert running == [0, 2]
    assert (await lend(lender)).handoff_id


async def test_a_loan_cannot_be_renewed_for_ever(start: Starter) -> None:
    clock = ManualClock()
    async with start("prefill", clock=clock) as lender:
        await lender.calls.release(await lender.calls.prefill(text=LONG))
        loan = await lend(lender)
        request = handoff_pb2.RenewRequest(epoch=lender.worker.epoch, handoff_ids=[loan.handoff_id])
        renewed = 0
        while (await unary(lender.calls.handoffs.Renew(request, timeout=PATIENCE_SECONDS))).leases[0].still_valid:
            clock.advance(lender.worker.leases.lease_seconds / 2)
            renewed += 1
            assert renewed < 100
        assert renewed * lender.worker.leases.lease_seconds / 2 >= 30
        await eventually(lambda: lender.blocks_used == len(lender.worker.leases) == 0)


async def test_no_loan_takes_more_than_the_share_of_held_blocks(start: Starter) -> None:
    for share, lends in ((0.15, False), (0.5, True)):
        async with start("prefill", "decode", handoff=HandoffConfig(held_share=share)) as lender:
            await lender.calls.decode(decode_request(text=LONG))
            assert bool((await lend(lender)).handoff_id) is lends


async def test_seals_are_made_and_checked_beside_the_event_loop(
    start: Starter, lender: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    seal, check = Sealer.seal, Sealer.check

    def spied_seal(sealer: Sealer, contents: BlockContents, digest: int) -> bytes:
        seen.append(threading.current_thread() is threading.main_thread())
        return seal(sealer, contents, digest)

    def spied_check(sealer: Sealer, sealed: bytes, contents: BlockContents, digest: int) -> None:
        seen.append(threading.current_thread() is threading.main_thread())
        check(sealer, sealed, contents, digest)

    monkeypatch.setattr(Sealer, "seal", spied_seal)
    monkeypatch.setattr(Sealer, "check", spied_check)
    async with start("prefill") as borrower:
        assert await borrowed_tokens(borrower, lender, lender.worker.address) == len(HASHES) * BLOCK_TOKENS
    # Each is sealed, and each check makes the seal that it compares.
    assert seen == [False] * 3 * len(HASHES)


class Refusing(handoff_pb2_grpc.HandoffServiceServicer):
    """Tells of its pool, counts who asks, and lends nothing."""

    def __init__(self, lender: Running) -> None:
        self._lender = lender.calls.handoffs
        self.asked = 0

    async def GetPool(self, request: handoff_pb2.GetPoolRequest, context: object) -> handoff_pb2.GetPoolResponse:
        self.asked += 1
        answer: handoff_pb2.GetPoolResponse = await self._lender.GetPool(request)
        return answer

    async def LendPrefix(self, request: object, context: object) -> handoff_pb2.LendPrefixResponse:
        raise Unsupported("lends nothing")


async def test_the_pool_of_a_peer_that_refuses_stays_open(start: Starter, lender: Running) -> None:
    refusing = Refusing(lender)
    add = handoff_pb2_grpc.add_HandoffServiceServicer_to_server
    service = Service("baton.engine.v1.HandoffService", add, refusing)
    async with (
        serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0) as server,
        start("prefill") as borrower,
    ):
        for number in range(3):
            assert await borrowed_tokens(borrower, lender, server.address, LONG[number:]) == 0
    assert refusing.asked == 1


async def borrowed_tokens(borrower: Running, lender: Running, address: str, text: bytes = LONG) -> int:
    request = prefill_pb2.PrefillRequest(request_id="r", prompt=prompt(text), sampling=sampling())
    request.prefix_source.CopyFrom(
        handoff_pb2.PrefixSource(
            worker_id=lender.worker.worker_id, epoch=lender.worker.epoch, address=address, num_blocks=len(HASHES)
        )
    )
    response = await unary(borrower.calls.prefills.Prefill(request, timeout=PATIENCE_SECONDS))
    await borrower.calls.release(response.handoff)
    tokens: int = response.handoff.usage.peer_cached_tokens
    return tokens
