"""A prompt's beginning, borrowed from another worker's prefix cache: the same ids, or computed, and no block lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.clients.scraping import since
from support.clients.worker_calls import Decoded, calls_to, decode_request, prompt, sampling
from support.clock import ManualClock
from support.cluster.workers import LEASE_SECONDS, Running, Starter, worker_process
from support.eventually import PATIENCE_SECONDS, eventually
from support.servers.prefix_loans import BLOCK_TOKENS, FULL, LONG, compute, nothing_is_left, prefill_from, source
from support.transports.nixl import NIXL

from baton.calls import unary
from baton.engine.v1 import decode_pb2, handoff_pb2, prefill_pb2
from baton.inference.v1 import timing_pb2
from engine_protocol.fault_injection import FAULT_KEY

TRANSPORTS = ("shm", NIXL, "tcp")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_a_peer_has_is_pulled_and_not_computed(start: Starter, transport: str) -> None:
    async with (
        start("prefill", transports=(transport,)) as lender,
        start("prefill", transports=(transport,)) as borrower,
    ):
        first = await compute(lender)
        response = await prefill_from(borrower, source(lender))
        assert response.handoff.first_token.token_id == first
        usage = response.handoff.usage
        assert (usage.cached_tokens, usage.peer_cached_tokens) == (FULL * BLOCK_TOKENS,) * 2
        assert usage.peer_seconds.ToNanoseconds() > 0
        [moved] = [each for each in response.timings if each.stage == timing_pb2.STAGE_PREFIX_TRANSFER]
        assert (moved.num_bytes, moved.transport) == (FULL * 1024, transport)
        await nothing_is_left(lender, borrower)


async def test_a_decode_worker_that_runs_the_prompt_borrows_too(start: Starter) -> None:
    async with start("prefill", "decode") as lender, start("decode") as borrower:
        whole = await lender.calls.decode(decode_request(text=LONG))
        request = decode_request(text=LONG)
        request.prefix_source.CopyFrom(source(lender))
        borrowed = await borrower.calls.decode(request)
        assert borrowed.token_ids == whole.token_ids
        assert _peer_tokens(borrowed) == FULL * BLOCK_TOKENS
        await nothing_is_left(lender, borrower)


async def test_a_decode_worker_lends(start: Starter) -> None:
    async with start("decode") as lender, start("prefill") as borrower:
        whole = await lender.calls.decode(decode_request(text=LONG))
        response = await prefill_from(borrower, source(lender))
        assert response.handoff.first_token.token_id == whole.token_ids[0]
        assert response.handoff.usage.peer_cached_tokens == FULL * BLOCK_TOKENS


async def test_only_what_is_not_cached_here_is_borrowed(start: Starter) -> None:
    async with start("prefill") as lender, start("prefill") as borrower:
        await compute(lender)
        await compute(borrower, LONG[: 5 * BLOCK_TOKENS + 1])
        usage = (await prefill_from(borrower, source(lender))).handoff.usage
        assert (usage.cached_tokens, usage.peer_cached_tokens) == (FULL * BLOCK_TOKENS, (FULL - 5) * BLOCK_TOKENS)


async def test_a_peer_that_has_less_lends_what_it_has(start: Starter) -> None:
    async with start("prefill") as lender, start("prefill") as borrower:
        await compute(lender, LONG[: 4 * BLOCK_TOKENS + 3])
        first = await compute(lender, LONG[::-1])
        assert first is not None
        usage = (await prefill_from(borrower, source(lender))).handoff.usage
        assert (usage.cached_tokens, usage.peer_cached_tokens) == (4 * BLOCK_TOKENS,) * 2


async def test_a_borrowed_prefix_is_cached_and_lent_on(start: Starter) -> None:
    async with start("prefill") as first, start("prefill") as second, start("prefill") as third:
        await compute(first)
        await prefill_from(second, source(first))
        assert (await prefill_from(third, source(second))).handoff.usage.peer_cached_tokens == FULL * BLOCK_TOKENS
        again = (await prefill_from(third, source(second))).handoff.usage
        assert (again.cached_tokens, again.peer_cached_tokens) == (FULL * BLOCK_TOKENS, 0)
        assert again.HasField("peer_seconds")
        assert not again.peer_has_none


async def test_nothing_crosses_a_cache_salt(start: Starter) -> None:
    async with start("prefill") as lender, start("prefill") as borrower:
        await compute(lender, salt="one tenant")
        usage = (await prefill_from(borrower, source(lender), salt="another")).handoff.usage
        assert (usage.cached_tokens, usage.peer_cached_tokens, usage.peer_has_none) == (0, 0, True)
        same = (await prefill_from(borrower, source(lender), salt="one tenant", request_id="s")).handoff.usage
        assert same.peer_cached_tokens == FULL * BLOCK_TOKENS


@pytest.mark.parametrize("wrong", ["epoch", "address", "layout"])
async def test_a_wrong_source_is_no_error_and_the_prompt_is_computed(start: Starter, wrong: str) -> None:
    other = {"block_bytes": 2048} if wrong == "layout" else {}
    async with start("prefill", **other) as lender, start("prefill") as borrower:
        first = await compute(lender)
        fields = {"epoch": {"epoch": 12}, "address": {"address": "127.0.0.1:1"}, "layout": {}}[wrong]
        response = await prefill_from(borrower, source(lender, **fields))
        assert response.handoff.first_token.token_id == first
        assert response.handoff.usage.cached_tokens == 0
        await nothing_is_left(lender, borrower)


async def test_damaged_bytes_are_computed_and_what_came_before_them_is_kept(start: Starter) -> None:
    damaged = since("baton_kv_damaged_blocks_total", tier="peer")
    async with start("prefill") as lender, start("prefill") as borrower:
        first = await compute(lender)
        response = await prefill_from(borrower, source(lender), fault="corrupt@lent")
        assert response.handoff.first_token.token_id == first
        assert response.handoff.usage.cached_tokens == (FULL - 1) * BLOCK_TOKENS
        assert damaged.grown == 1
        await nothing_is_left(lender, borrower)


async def test_nothing_more_is_borrowed_from_a_peer_whose_blocks_were_damaged_three_times(start: Starter) -> None:
    texts = [LONG[number:] + LONG[:number] for number in range(4)]
    async with start("prefill") as lender, start("prefill") as borrower:
        firsts = [await compute(lender, text) for text in texts]
        plans = ["corrupt@lent"] * 3 + [""]
        responses = [
            await prefill_from(borrower, source(lender), text, plan) for text, plan in zip(texts, plans, strict=True)
        ]
        assert [each.handoff.first_token.token_id for each in responses] == firsts
        peer = [each.handoff.usage.peer_cached_tokens for each in responses]
        assert peer == [(FULL - 1) * BLOCK_TOKENS] * 3 + [0]


@pytest.mark.parametrize("point", ["borrow", "lent", "borrowed"])
async def test_a_borrower_that_is_cancelled_leaves_nothing_behind(start: Starter, point: str) -> None:
    async with start("prefill") as lender, start("prefill") as borrower:
        await compute(lender)
        running = asyncio.ensure_future(prefill_from(borrower, source(lender), fault=f"hang@{point}"))
        await eventually(lambda: borrower.blocks_used == FULL and len(lender.worker.leases) == (point != "borrow"))
        running.cancel()
        await asyncio.wait([running])
        await nothing_is_left(lender, borrower)


@pytest.mark.parametrize("point", ["borrow", "lent", "borrowed"])
async def test_a_loan_that_takes_longer_than_computing_is_given_up(start: Starter, point: str) -> None:
    late = since("baton_prefix_loans_total", outcome="late")
    async with start("prefill") as lender, start("prefill") as borrower:
        first = await compute(lender)
        hint = source(lender)
        hint.patience.FromMilliseconds(300)
        response = await prefill_from(borrower, hint, fault=f"hang@{point}")
        assert response.handoff.first_token.token_id == first
        usage = response.handoff.usage
        assert usage.peer_cached_tokens == 0
        assert usage.peer_seconds.ToMilliseconds() >= 300
        assert late.grown == 1
        await nothing_is_left(lender, borrower)


@pytest.mark.parametrize("point", ["lent", "borrowed"])
async def test_a_loan_whose_lease_has_expired_is_not_used(start: Starter, point: str) -> None:
    clock = ManualClock()
    async with start("prefill", clock=clock) as lender, start("prefill") as borrower:
        first = await compute(lender)
        running = asyncio.ensure_future(prefill_from(borrower, source(lender), fault=f"delay=0.5@{point}"))
        await eventually(lambda: len(lender.worker.leases) == 1)
        lender.let_a_lease_pass()
        response = await running
        assert response.handoff.first_token.token_id == first
        assert response.handoff.usage.cached_tokens == 0
        await nothing_is_left(lender, borrower)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("point", ["borrow", "lent", "borrowed"])
async def test_a_lender_that_is_killed_loses_the_loan_and_no_token(
    start: Starter, tmp_path: Path, transport: str, point: str
) -> None:
    async with start("prefill", transports=(transport,)) as borrower, AsyncExitStack() as stack:
        process = stack.enter_context(worker_process("prefill", tmp_path, f"transports=[{transport}]"))
        calls = await stack.enter_async_context(calls_to(process.address))
        request = prefill_pb2.PrefillRequest(request_id="own", prompt=prompt(LONG), sampling=sampling())
        handoff = (await unary(calls.prefills.Prefill(request, timeout=PATIENCE_SECONDS))).handoff
        await calls.release(handoff)
        hint = handoff_pb2.PrefixSource(
            worker_id=handoff.worker_id, epoch=handoff.epoch, address=handoff.address, num_blocks=FULL
        )
        running = asyncio.ensure_future(prefill_from(borrower, hint, fault=f"delay=0.5@{point}"))
        await eventually(lambda: borrower.blocks_used == FULL)
        process.kill()
        response = await running
        assert response.handoff.first_token.token_id == handoff.first_token.token_id
        assert response.handoff.usage.cached_tokens == 0
        await eventually(lambda: borrower.blocks_used == 0)


async def test_a_borrower_that_is_killed_frees_the_blocks_of_its_lender_within_a_lease(
    start: Starter, tmp_path: Path
) -> None:
    async with start("prefill") as lender:
        await compute(lender)
        with worker_process("prefill", tmp_path, "engine.allow_faults=true") as process:
            async with calls_to(process.address) as calls:
                request = prefill_pb2.PrefillRequest(
                    request_id="r", prompt=prompt(LONG), sampling=sampling(), prefix_source=source(lender)
                )
                call = calls.prefills.Prefill(request, metadata=[(FAULT_KEY, "hang@lent")], timeout=PATIENCE_SECONDS)
                await eventually(lambda: lender.blocks_held == FULL)
                process.kill()
                call.cancel()
                await eventually(lambda: lender.blocks_used == 0, LEASE_SECONDS + 1)


async def test_a_full_pool_computes_after_its_patience(start: Starter) -> None:
    async with start("prefill") as lender, start("prefill", num_blocks=16) as borrower:
        first = await compute(lender)
        held = await borrower.calls.prefill("held", b"x" * 100)
        hint = source(lender)
        hint.patience.FromMilliseconds(200)
        running = asyncio.ensure_future(prefill_from(borrower, hint))
        await asyncio.wait([running], timeout=0.5)
        await borrower.calls.release(held)
        assert (await running).handoff.first_token.token_id == first
        await nothing_is_left(lender, borrower)


async def test_64_borrowers_at_once(start: Starter) -> None:
    async with start("prefill", num_blocks=128) as lender, AsyncExitStack() as stack:
        first = await compute(lender)
        borrowers = [await stack.enter_async_context(start("prefill", num_blocks=16)) for _ in range(8)]
        asked = [
            prefill_from(borrower, source(lender), request_id=f"r{turn}") for borrower in borrowers for turn in range(8)
        ]
        responses = await asyncio.gather(*asked)
        assert {each.handoff.first_token.token_id for each in responses} == {first}
        peer = [each.handoff.usage.peer_cached_tokens for each in responses]
        assert sum(tokens > 0 for tokens in peer) >= len(borrowers)
        await nothing_is_left(lender, *borrowers)


async def test_prompts_that_begin_alike_borrow_their_beginning_once(start: Starter) -> None:
    async with start("prefill") as lender, start("prefill") as borrower:
        await compute(lender)
        hint = source(lender)
        asked = [prefill_from(borrower, hint, request_id=f"r{turn}") for turn in range(8)]
        peer = [each.handoff.usage.peer_cached_tokens for each in await asyncio.gather(*asked)]
        assert sorted(peer) == [0] * 7 + [FULL * BLOCK_TOKENS]


def _peer_tokens(decoded: Decoded) -> int:
    assert isinstance(decoded.finished, decode_pb2.DecodeFinished)
    return decoded.finished.usage.peer_cached_tokens


@pytest.fixture
def start() -> Starter:
    """Workers that take fault plans."""
    return Starter(allow_faults=True)


@pytest.fixture
async def prefill(start: Starter) -> AsyncIterator[Running]:
    async with start("prefill") as running:
        yield running
