"""Which cancels count: those of calls that had no time to be answered, and not those that callers make in earnest."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from grpc import aio
from hyperframe.frame import DataFrame, RstStreamFrame
from support.clients.scraping import since
from support.eventually import eventually
from support.http2.peer import Peer, message, opened, peer_of
from support.http2.server import Echoing, echoing, path

from baton_http2.limits import Http2Limits, Rate

REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM = 7, 8, 11
EXCEEDED = "baton_http2_budget_exceeded_total"
# That no amount of time earns anything.
TWO = Rate(burst=2, per_second=0)
STRICT = Http2Limits(resets=TWO, empty_frames=TWO)


async def reset(peer: Peer, stream_id: int) -> None:
    await peer.send(RstStreamFrame(stream_id, error_code=CANCEL))


async def begin(server: Echoing, peer: Peer, stream_id: int) -> None:
    """A call that runs and is not answered."""
    running = server.seen.started
    await peer.call(stream_id, "hang", b"")
    await eventually(lambda: server.seen.started == running + 1)


async def test_cancels_of_calls_that_were_answered_do_not_count() -> None:
    async with echoing(STRICT) as server, peer_of(server.port) as peer:
        for stream_id in range(1, 101, 2):
            await peer.call(stream_id, "hang", b"x")
            await peer.until(lambda: bool(peer.answer(stream_id).messages))  # noqa: B023
        for stream_id in range(1, 101, 2):
            await reset(peer, stream_id)
        for stream_id in range(101, 105, 2):
            await begin(server, peer, stream_id)
            await reset(peer, stream_id)
        await peer.ping()


async def test_early_cancels_of_calls_that_run_end_the_connection() -> None:
    counted = since(EXCEEDED, budget="resets")
    async with echoing(STRICT) as server, peer_of(server.port) as peer:
        for stream_id in (1, 3, 5):
            await begin(server, peer, stream_id)
        for stream_id in (1, 3, 5):
            await reset(peer, stream_id)
        assert await peer.closed() == ENHANCE_YOUR_CALM
    assert counted.grown == 1


async def test_cancels_of_calls_that_waited_long_do_not_count() -> None:
    limits = Http2Limits(resets=TWO, premature_seconds=0.05)
    async with echoing(limits) as server, peer_of(server.port) as peer:
        for stream_id in range(1, 41, 2):
            await begin(server, peer, stream_id)
        await asyncio.sleep(0.1)
        for stream_id in range(1, 41, 2):
            await reset(peer, stream_id)
        await peer.ping()
        await eventually(lambda: server.seen.cancelled == 20)


async def test_whose_calls_are_answered_may_cancel_as_many_early() -> None:
    async with echoing(STRICT) as server, peer_of(server.port) as peer:
        for stream_id in range(1, 201, 4):
            await peer.call(stream_id, "unary", b"x")
            await peer.ended(stream_id)
            await begin(server, peer, stream_id + 2)
            await reset(peer, stream_id + 2)
        await peer.ping()


async def test_cancels_that_cross_the_answers_end_are_paid_by_the_answers() -> None:
    """Cancels like those of callers whose deadline has come, which the server knows too."""
    async with echoing(STRICT) as server, peer_of(server.port) as peer:
        for stream_id in range(1, 101, 2):
            await peer.call(stream_id, "unary", b"x")
            await peer.ended(stream_id)
            await reset(peer, stream_id)
        await peer.ping()


async def test_what_is_wrong_on_a_stream_counts_though_the_call_was_answered() -> None:
    """MadeYouReset: the peer never cancels, and makes the server do it."""
    async with echoing(STRICT) as server, peer_of(server.port) as peer:
        for stream_id in range(1, 201, 2):
            await peer.call(stream_id, "hang", b"x")
            await peer.until(lambda: bool(peer.answer(stream_id).messages) or peer.is_closed)  # noqa: B023
            await peer.send(opened(stream_id, 0))
            if peer.is_closed:
                break
        assert await peer.closed() == ENHANCE_YOUR_CALM


async def test_the_end_of_a_request_that_was_answered_before_it_does_not_count() -> None:
    async with echoing(STRICT) as server, peer_of(server.port) as peer:
        for stream_id in range(1, 101, 2):
            await peer.call(stream_id, "abort", b"x", end=False)
            await peer.ended(stream_id)
            await peer.send(DataFrame(stream_id, flags=["END_STREAM"]))
        await peer.ping()


async def test_the_rest_of_a_large_request_that_was_answered_before_it_does_not_count() -> None:
    body = message(bytes(500_000))
    async with echoing(STRICT) as server, peer_of(server.port) as peer:
        for stream_id in range(1, 41, 2):
            await peer.call(stream_id, "abort", b"x", end=False)
            await peer.ended(stream_id)
            frames = [DataFrame(stream_id, body[at : at + 16_000]) for at in range(0, len(body), 16_000)]
            await peer.send(*frames[:-1], DataFrame(stream_id, frames[-1].data, flags=["END_STREAM"]))
        await peer.ping()


async def test_more_after_the_end_than_the_window_allowed_is_an_error_of_the_stream() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        await peer.call(1, "abort", b"x", end=False)
        await peer.ended(1)
        await peer.send(*[DataFrame(1, bytes(16_000))] * 70)
        await peer.until(lambda: peer.answer(1).reset == 5)


# Cancels that are early however long they take, a few a second, and many more before the connection ends.
OFTEN = Http2Limits(resets=Rate(burst=100, per_second=50), resets_multiple=100, premature_seconds=60)


@asynccontextmanager
async def reading(server: Echoing, limits: range = range(1, 21, 2)) -> AsyncGenerator[Peer, None]:
    """A peer with calls whose answers have begun."""
    async with peer_of(server.port, INITIAL_WINDOW_SIZE=2**20) as peer:
        for stream_id in limits:
            await peer.call(stream_id, "bidi", b"before", end=False)
            await peer.until(lambda: bool(peer.answer(stream_id).messages))  # noqa: B023
        yield peer


async def cancel(peer: Peer, streams: range) -> None:
    for stream_id in streams:
        await peer.call(stream_id, "hang", b"")
        await reset(peer, stream_id)


async def test_beside_answers_new_calls_are_refused_while_too_many_were_cancelled_and_the_answers_go_on() -> None:
    counted = since(EXCEEDED, budget="resets")
    async with echoing(OFTEN) as server, reading(server) as peer:
        await cancel(peer, range(21, 321, 2))
        await peer.ping()
        refused = sum(peer.answer(stream_id).reset == REFUSED_STREAM for stream_id in range(21, 321, 2))
        assert 10 < refused < 60
        for stream_id in range(1, 21, 2):
            await peer.send(DataFrame(stream_id, message(b"after"), flags=["END_STREAM"]))
            assert (await peer.ended(stream_id)).messages == [b"before", b"after"]
    assert counted.grown == 0


async def test_calls_are_taken_again_once_the_cancels_are_paid() -> None:
    async with echoing(OFTEN) as server, reading(server) as peer:
        await cancel(peer, range(21, 321, 2))
        await peer.ping()
        assert peer.answer(319).reset == REFUSED_STREAM
        stream_id = 321
        async with asyncio.timeout(10):
            while True:
                await peer.call(stream_id, "unary", b"hi")
                if (await peer.ended(stream_id)).messages == [b"hi"]:
                    break
                stream_id += 2
                # Refused calls count too: whoever tries again at once, thousands of times a second, is cut off.
                await asyncio.sleep(0.01)


async def test_what_is_read_of_other_calls_pays_for_cancels() -> None:
    async with echoing(OFTEN) as server, reading(server) as peer:
        await peer.send(opened(0, 2**24))
        await peer.call(21, "large", b"500000")
        await peer.ended(21)
        await cancel(peer, range(23, 383, 2))
        await peer.ping()
        assert all(peer.answer(stream_id).reset is None for stream_id in range(23, 383, 2))


async def test_many_times_as_many_cancels_end_a_connection_with_answers_too() -> None:
    counted = since(EXCEEDED, budget="resets")
    limits = Http2Limits(resets=Rate(burst=20, per_second=0.1), premature_seconds=60)
    async with echoing(limits) as server, reading(server) as peer:
        await cancel(peer, range(21, 1021, 2))
        assert await peer.closed() == ENHANCE_YOUR_CALM
    assert counted.grown == 1


async def test_hundreds_of_cancels_of_running_streams_leave_the_other_streams_of_a_connection_alone() -> None:
    """The calls of many clients on a proxy's one connection."""
    counted = since(EXCEEDED, budget="resets")
    async with echoing() as server, aio.insecure_channel(server.address) as channel:
        other = channel.unary_stream(path("ticks"))(b"")
        before = [await other.read() for _ in range(5)]

        async def begin_and_cancel(times: int) -> None:
            for _ in range(times):
                call = channel.unary_stream(path("hang"))(b"x")
                assert await call.read() == b"x"
                call.cancel()

        await asyncio.gather(*(begin_and_cancel(50) for _ in range(60)))
        after = [await other.read() for _ in range(5)]
        assert float(after[-1]) > float(before[-1])
        await eventually(lambda: server.seen.cancelled == 3000)
    assert counted.grown == 0


async def test_a_second_of_a_proxys_early_cancels_is_no_attack() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        for first in range(1, 3001, 200):
            for stream_id in range(first, first + 200, 2):
                await peer.call(stream_id, "hang", b"")
            await eventually(lambda: server.seen.started == (first + 199) // 2)  # noqa: B023
            await peer.send(*(RstStreamFrame(each, error_code=CANCEL) for each in range(first, first + 200, 2)))
        await peer.ping()
        await eventually(lambda: server.seen.cancelled == 1500)
