"""A worker whose decodes a router moves: its handoffs hold, and are free when nobody takes them."""

import asyncio
from contextlib import aclosing
from hashlib import sha256

import pytest
from support.clients.worker_calls import decode_request
from support.cluster.workers import Running, Starter
from support.eventually import eventually

from baton.calls import stream, unary
from baton.engine.v1 import decode_pb2
from baton.errors import HandoffLost, StreamAdopted

STEP = {"decode_step_seconds": 0.005}


def _long(tokens: int = 100) -> decode_pb2.DecodeRequest:
    request = decode_request(max_tokens=tokens)
    request.sampling.stop.ignore_eos = True
    return request


async def _yielded(running: Running, after: int = 10) -> tuple[list[int], decode_pb2.DecodeYielded]:
    ids: list[int] = []
    call = running.calls.decodes.Decode(_long(), timeout=30)
    async with aclosing(stream(call)) as responses:
        async for response in responses:
            ids += response.tokens.token_ids
            if len(ids) >= after and response.HasField("tokens"):
                after = 10**6
                answer = await unary(running.calls.decodes.Yield(decode_pb2.YieldRequest(request_id="r"), timeout=30))
                assert answer.is_running
            if response.HasField("yielded"):
                return ids, response.yielded
    raise AssertionError("the decode has not yielded")


async def test_a_decode_that_yields_goes_on_on_another_worker_and_frees_its_blocks(start: Starter) -> None:
    async with start("decode", **STEP) as source, start("decode", **STEP) as target:
        whole = await target.calls.decode(_long())
        ids, yielded = await _yielded(source)
        assert yielded.handoff.is_yielded
        assert yielded.handoff.first_token.token_id == ids[-1]
        assert yielded.handoff.num_tokens == len(_long().prompt.token_ids) + len(ids) - 1
        request = _long()
        request.handoff.CopyFrom(yielded.handoff)
        request.emitted.extend(ids)
        assert [*ids, *(await target.calls.decode(request)).token_ids] == whole.token_ids
        assert source.blocks_used == 0


async def test_what_a_decode_has_yielded_is_free_after_a_lease(start: Starter) -> None:
    async with start("decode", **STEP) as source:
        _, yielded = await _yielded(source)
        assert source.blocks_held == len(yielded.handoff.block_ids)
        source.let_a_lease_pass()
        await eventually(lambda: source.blocks_used == 0)
        assert not (await source.calls.renew(yielded.handoff)).still_valid


async def test_an_abort_frees_what_a_decode_has_yielded(start: Starter) -> None:
    async with start("decode", **STEP) as source:
        _, yielded = await _yielded(source)
        assert (await source.calls.abort()).blocks_freed == len(yielded.handoff.block_ids)
        assert source.blocks_used == 0


async def test_a_decode_that_is_left_before_its_yield_is_heard_holds_nothing(start: Starter) -> None:
    async with start("decode", **STEP) as source:
        call = source.calls.decodes.Decode(_long(), timeout=30)
        async with aclosing(stream(call)) as responses:
            async for response in responses:
                if response.HasField("tokens"):
                    break
            asking = decode_pb2.YieldRequest(request_id="r")
            await unary(source.calls.decodes.Yield(asking, timeout=30))
        await eventually(lambda: source.blocks_used == 0)


async def test_nothing_yields_or_lends_that_does_not_run(start: Starter) -> None:
    async with start("decode") as source:
        asked = decode_pb2.YieldRequest(request_id="unknown")
        assert not (await unary(source.calls.decodes.Yield(asked, timeout=30))).is_running
        lending = decode_pb2.LendBlocksRequest(request_id="unknown", num_tokens=100)
        assert not (await unary(source.calls.decodes.LendBlocks(lending, timeout=30))).HasField("handoff")


async def test_a_router_that_was_followed_by_another_cannot_move_the_decode(start: Starter) -> None:
    async with start("decode", **STEP) as source:
        request = _long(300)
        request.keep.secret_sha256 = request.keep.owner_sha256 = sha256(b"").digest()
        request.keep.grace.FromSeconds(1)
        reading = asyncio.ensure_future(source.calls.decode(request))
        await eventually(lambda: source.blocks_used > 0)
        for method, asked in (
            (source.calls.decodes.Yield, decode_pb2.YieldRequest(request_id="r", attachment=7)),
            (
                source.calls.decodes.LendBlocks,
                decode_pb2.LendBlocksRequest(request_id="r", attachment=7, num_tokens=50),
            ),
        ):
            with pytest.raises(StreamAdopted):
                await unary(method(asked, timeout=30))
        assert len((await reading).token_ids) == 300


async def test_lent_blocks_warm_the_prefix_cache_of_another_worker(start: Starter) -> None:
    async with start("decode", **STEP) as source, start("decode", **STEP) as target:
        ids: list[int] = []
        async with aclosing(stream(source.calls.decodes.Decode(_long(), timeout=30))) as responses:
            async for response in responses:
                ids += response.tokens.token_ids
                if len(ids) >= 40:
                    break
            tokens = len(_long().prompt.token_ids) + len(ids)
            lending = decode_pb2.LendBlocksRequest(request_id="r", num_tokens=tokens)
            lent = (await unary(source.calls.decodes.LendBlocks(lending, timeout=30))).handoff
        warm = decode_pb2.WarmRequest(request_id="r", prompt=_long().prompt, emitted=ids, handoff=lent)
        assert (await unary(target.calls.decodes.Warm(warm, timeout=30))).num_bytes == lent.num_bytes
        await eventually(lambda: source.blocks_used == target.blocks_used == 0)
        request = _long()
        request.emitted.extend(ids)
        finished = (await target.calls.decode(request)).finished
        assert finished is not None
        assert finished.usage.cached_tokens >= len(_long().prompt.token_ids) // 16 * 16
        with pytest.raises(HandoffLost):
            await unary(target.calls.decodes.Warm(warm, timeout=30))


def _kept(grace: float) -> decode_pb2.DecodeRequest:
    request = _long(900)
    request.keep.secret_sha256 = sha256(b"s" * 16).digest()
    request.keep.owner_sha256 = sha256(b"owner").digest()
    request.keep.grace.FromNanoseconds(int(grace * 1e9))
    return request


async def _yields_without_a_reader(source: Running, grace: float) -> None:
    async with aclosing(stream(source.calls.decodes.Decode(_kept(grace), timeout=30))) as responses:
        async for response in responses:
            if response.HasField("tokens"):
                break
    asking = decode_pb2.YieldRequest(request_id="r", attachment=1)
    assert (await unary(source.calls.decodes.Yield(asking, timeout=30))).is_running
    await eventually(lambda: source.worker.kept.streams[0].has_ended)
    assert source.blocks_held > 0


@pytest.mark.parametrize("forget", [False, True])
async def test_what_a_kept_decode_yields_unheard_is_free_once_it_is_settled(start: Starter, forget: bool) -> None:
    async with start("decode", **STEP) as source:
        await _yields_without_a_reader(source, grace=30)
        settling = decode_pb2.SettleRequest(request_id="r", attachment=1, forget=forget)
        await unary(source.calls.decodes.Settle(settling, timeout=30))
        await eventually(lambda: source.blocks_used == 0)


async def test_what_a_kept_decode_yields_unheard_is_free_after_its_grace(start: Starter) -> None:
    async with start("decode", **STEP) as source:
        await _yields_without_a_reader(source, grace=0.5)
        await eventually(lambda: len(source.worker.kept) == 0)
        await eventually(lambda: source.blocks_used == 0)


async def test_a_kept_decode_that_was_heard_to_yield_is_held_beyond_its_grace(start: Starter) -> None:
    async with start("decode", **STEP) as source:
        await _yields_without_a_reader(source, grace=0.5)
        asking = decode_pb2.AttachRequest(
            request_id="r", attempt=1, secret=b"s" * 16, owner_sha256=sha256(b"owner").digest()
        )
        async with aclosing(stream(source.calls.decodes.Attach(asking, timeout=30))) as responses:
            [yielded] = [response.yielded async for response in responses if response.HasField("yielded")]
        await eventually(lambda: len(source.worker.kept) == 0)
        assert (await source.calls.renew(yielded.handoff)).still_valid
        assert (await source.calls.release(yielded.handoff)).blocks_freed == len(yielded.handoff.block_ids)
