"""Requests that are not read yet: what they may use of memory and of time, of one peer and of a process."""

import asyncio
import gzip
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from grpc import aio
from hyperframe.frame import DataFrame
from support.clients.scraping import since
from support.eventually import eventually
from support.http2.peer import Peer, head, message, peer_of
from support.http2.server import Echoing, echoing, path

from baton_http2.input_budget import InputBudget, InputLimits, claim_hold, offer_hold

MIB = 2**20
DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 4, 8
EXCEEDED = "baton_http2_budget_exceeded_total"
# Without a stall in sight: for tests of memory.
SMALL = InputLimits(process_bytes=24 * MIB, peer_bytes=16 * MIB, wait_seconds=0.3)
HURRIED = InputLimits(stall_seconds=0.3, bytes_per_second=1000)


@asynccontextmanager
async def bounded(limits: InputLimits = SMALL, max_message_bytes: int = 64 * MIB) -> AsyncGenerator[Echoing, None]:
    async with echoing(input=limits, max_message_bytes=max_message_bytes) as server:
        yield server


async def announce(peer: Peer, stream_id: int, size: int, method: str = "unary") -> None:
    """The beginning of a message of so many bytes."""
    await peer.call(stream_id, method, end=False)
    await peer.send(DataFrame(stream_id, b"\0" + size.to_bytes(4, "big")))


async def fill(peer: Peer, stream_id: int, size: int) -> None:
    """So many bytes of it, within a new stream's window."""
    await peer.send(*[DataFrame(stream_id, bytes(16_000))] * (size // 16_000))


async def test_a_message_over_a_window_waits_until_others_leave_it_its_bytes() -> None:
    async with bounded(InputLimits(process_bytes=32 * MIB, peer_bytes=32 * MIB)) as server:
        budget = server.server.connections.input
        content = bytes(8 * MIB)
        async with aio.insecure_channel(server.address, options=[("grpc.max_receive_message_length", -1)]) as channel:
            answers = await asyncio.gather(*(channel.unary_unary(path("unary"))(content) for _ in range(6)))
        assert [len(answer) for answer in answers] == [len(content)] * 6
        await eventually(lambda: budget.used == 0)


async def test_a_message_that_waits_too_long_for_its_bytes_is_refused() -> None:
    counted = since(EXCEEDED, budget="unread_input")
    async with bounded() as server, peer_of(server.port) as peer:
        for stream_id in (1, 3):
            await announce(peer, stream_id, 8 * MIB)
            await fill(peer, stream_id, MIB)
        answer = await peer.ended(3)
        assert answer.status == RESOURCE_EXHAUSTED
        assert "try again" in answer.headers[0]["grpc-message"]
        assert not peer.answer(1).headers
        await peer.call(5, "unary", b"hi")
        assert (await peer.ended(5)).messages == [b"hi"]
    assert counted.grown == 1


async def test_a_message_that_can_never_fit_is_refused_at_once() -> None:
    async with (
        bounded(InputLimits(process_bytes=16 * MIB, peer_bytes=16 * MIB)) as server,
        peer_of(server.port) as peer,
    ):
        await announce(peer, 1, 32 * MIB)
        await fill(peer, 1, MIB)
        assert (await peer.ended(1)).status == RESOURCE_EXHAUSTED


async def test_unfinished_messages_of_many_connections_use_no_more_than_their_peers_budget() -> None:
    async with bounded() as server:
        async with AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(peer_of(server.port)) for _ in range(4)]
            for peer in peers:
                for stream_id in range(1, 17, 2):
                    await announce(peer, stream_id, 900_000)
                    await fill(peer, stream_id, 880_000)
                await peer.ping()
            assert server.server.connections.input.used <= SMALL.peer_bytes
            statuses = [answer.status for peer in peers for answer in peer.answers.values() if answer.is_ended]
            assert len(statuses) > 8
            assert set(statuses) == {RESOURCE_EXHAUSTED}
        await eventually(lambda: server.server.connections.input.used == 0)


async def test_what_is_not_grpc_is_not_kept() -> None:
    async with bounded() as server, peer_of(server.port) as peer:
        block = peer.block(head("unary", content_type="text/plain"))
        await peer.send(b"".join([(len(block)).to_bytes(3, "big"), b"\x01\x04", (1).to_bytes(4, "big"), block]))
        await peer.send(DataFrame(1, b"\0" + (60 * MIB).to_bytes(4, "big")))
        await fill(peer, 1, MIB)
        await peer.ping()
        assert server.server.connections.input.used == 0


@pytest.mark.parametrize("method", ["unary", "gather"])
@pytest.mark.parametrize("first", [0, 3, 5, 700])
async def test_a_message_that_comes_byte_by_byte_is_refused(method: str, first: int) -> None:
    if not first and method == "gather":
        pytest.skip("a stream of requests may be silent")
    counted = since(EXCEEDED, budget="slow_request")
    async with bounded(HURRIED) as server, peer_of(server.port) as peer:
        await peer.call(1, method, end=False)
        content = message(bytes(10_000))
        dripping = asyncio.create_task(drip(peer, content[:first], content[first:]))
        answer = await peer.ended(1)
        dripping.cancel()
        assert answer.status == DEADLINE_EXCEEDED
        await peer.call(3, "unary", b"hi")
        assert (await peer.ended(3)).messages == [b"hi"]
    assert counted.grown == 1


async def drip(peer: Peer, first: bytes, rest: bytes) -> None:
    if first:
        await peer.send(DataFrame(1, first))
        for byte in rest:
            await peer.send(DataFrame(1, bytes([byte])))
            await asyncio.sleep(0.02)


async def test_a_slow_message_that_keeps_the_rate_is_taken() -> None:
    async with bounded(HURRIED) as server, peer_of(server.port) as peer:
        await peer.call(1, "unary", end=False)
        content = message(bytes(5_000))
        for at in range(0, len(content), 250):
            await peer.send(DataFrame(1, content[at : at + 250]))
            await asyncio.sleep(0.05)
        assert (await peer.ended(1)).messages == [bytes(5_000)]


async def test_a_message_has_a_deadline_whatever_its_rate() -> None:
    limits = InputLimits(stall_seconds=0.2, bytes_per_second=1, message_seconds=0.5)
    async with bounded(limits) as server, peer_of(server.port) as peer:
        await announce(peer, 1, 10_000)
        dripping = asyncio.create_task(drip(peer, b"x", bytes(9_000)))
        assert (await peer.ended(1)).status == DEADLINE_EXCEEDED
        dripping.cancel()


async def test_a_stream_of_requests_may_pause_between_its_messages() -> None:
    async with bounded(HURRIED) as server, peer_of(server.port) as peer:
        await peer.call(1, "bidi", b"one", end=False)
        await asyncio.sleep(1)
        await peer.send(DataFrame(1, message(b"two"), flags=["END_STREAM"]))
        assert (await peer.ended(1)).messages == [b"one", b"two"]


async def test_a_compressed_message_counts_with_its_plain_size() -> None:
    async with bounded() as server, peer_of(server.port) as peer:
        bomb = gzip.compress(bytes(40 * MIB))
        await peer.send(*compressed_call(peer, 1, bomb))
        answer = await peer.ended(1)
        assert answer.status == RESOURCE_EXHAUSTED
        assert server.server.connections.input.used == 0


async def test_compressed_messages_are_decompressed_one_after_the_other() -> None:
    used = 0
    async with (
        bounded(InputLimits(process_bytes=16 * MIB, peer_bytes=16 * MIB)) as server,
        peer_of(server.port) as peer,
    ):
        content = gzip.compress(bytes(9 * MIB))
        for stream_id in range(1, 17, 2):
            await peer.send(*compressed_call(peer, stream_id, content))

        def all_answered() -> bool:
            nonlocal used
            used = max(used, server.server.connections.input.used)
            return sum(answer.is_ended for answer in peer.answers.values()) == 8

        receiving = asyncio.create_task(peer.until(all_answered))
        await eventually(all_answered, 30)
        await receiving
        await eventually(lambda: server.server.connections.input.used == 0)
        assert {answer.status for answer in peer.answers.values() if answer.is_ended} == {0}
    assert 4 * MIB < used < 10 * MIB


def compressed_call(peer: Peer, stream_id: int, content: bytes) -> list[bytes]:
    block = peer.block(head("count", ("grpc-encoding", "gzip")))
    frames = [len(block).to_bytes(3, "big") + b"\x01\x04" + stream_id.to_bytes(4, "big") + block]
    body = message(content, compressed=1)
    frames += [DataFrame(stream_id, body[at : at + 16_000]).serialize() for at in range(0, len(body), 16_000)]
    return [*frames, DataFrame(stream_id, flags=["END_STREAM"]).serialize()]


async def test_bytes_that_were_waited_for_by_a_call_that_has_gone_are_not_counted() -> None:
    budget = InputBudget(SMALL)
    peer = budget.of_peer("somewhere")
    decided: list[bool] = []
    assert peer.reserve(12 * MIB, decided.append) is None
    gone, there = peer.reserve(MIB, decided.append), peer.reserve(2 * MIB, decided.append)
    assert gone is not None
    assert there is not None
    gone.cancel()
    peer.add(-12 * MIB)
    await eventually(lambda: decided == [True])
    assert (peer.used, budget.used) == (2 * MIB, 2 * MIB)


async def test_a_peer_that_uses_all_of_its_own_leaves_others_theirs() -> None:
    budget = InputBudget(InputLimits(process_bytes=32 * MIB, peer_bytes=16 * MIB))
    first, second = budget.of_peer("one"), budget.of_peer("other")
    assert not first.add(17 * MIB)
    assert second.add(1000)
    assert second.reserve(MIB, lambda _: None) is None


def test_what_holds_a_messages_bytes_frees_them_once() -> None:
    peer = InputBudget(SMALL).of_peer("somewhere")
    hold = peer.hold(100)
    assert hold.grow(50)
    offer_hold(hold)
    assert claim_hold() is hold
    offer_hold(None)
    assert peer.used == 150
    hold.release()
    hold.release()
    assert peer.used == 0


async def test_time_in_which_the_server_itself_stood_still_does_not_count() -> None:
    limits = InputLimits(stall_seconds=1.2, bytes_per_second=1000)
    async with bounded(limits) as server, peer_of(server.port) as peer:
        content = message(bytes(5_000))
        await peer.call(1, "unary", end=False)
        await peer.send(DataFrame(1, content[:100]))
        await asyncio.sleep(0.5)
        time.sleep(1.5)  # noqa: ASYNC251  # as a process that is stopped
        await asyncio.sleep(0.1)
        await peer.send(DataFrame(1, content[100:], flags=["END_STREAM"]))
        assert (await peer.ended(1)).messages == [bytes(5_000)]
