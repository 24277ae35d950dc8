"""The limits of a connection that are about time and number: each is a setting, and counted when it is met."""

import asyncio
from pathlib import Path

from hyperframe.frame import DataFrame, Frame, PingFrame, SettingsFrame
from support.certificates import Authority
from support.clients.scraping import since
from support.eventually import eventually
from support.http2.peer import PREFACE, Peer, message, opened, peer_of, silent_peer
from support.http2.server import echoing

from baton_http2.limits import Http2Limits, Rate
from rpc.auth.tls import TlsConfig

EXCEEDED = "baton_http2_budget_exceeded_total"
ENHANCE_YOUR_CALM = 11


async def test_a_peer_that_says_nothing_is_let_go() -> None:
    counted = since(EXCEEDED, budget="handshake")
    async with echoing(Http2Limits(handshake_seconds=0.1)) as server, silent_peer(server.port) as peer:
        assert await peer.closed() == ENHANCE_YOUR_CALM
    assert counted.grown == 1


async def test_a_peer_that_says_only_the_preface_is_let_go() -> None:
    async with echoing(Http2Limits(handshake_seconds=0.1)) as server, silent_peer(server.port) as peer:
        await peer.send(PREFACE)
        assert await peer.closed() == ENHANCE_YOUR_CALM


async def test_a_peer_that_does_not_shake_hands_for_tls_is_let_go(tmp_path: Path) -> None:
    pair = Authority(tmp_path, "ours").issue("server")
    tls = TlsConfig(cert=pair.cert, key=pair.key)
    async with echoing(Http2Limits(handshake_seconds=0.1), tls) as server, silent_peer(server.port) as peer:
        assert await peer.closed() is None


async def test_more_connections_of_a_peer_than_the_limit_are_refused_until_one_is_gone() -> None:
    counted = since(EXCEEDED, budget="connections")
    async with echoing(Http2Limits(max_connections_per_peer=2)) as server:
        async with peer_of(server.port) as first, peer_of(server.port) as second, peer_of(server.port) as third:
            await first.ping()
            await second.ping()
            assert await third.closed() == ENHANCE_YOUR_CALM
        await eventually(lambda: not server.server.connections.open)
        async with peer_of(server.port) as peer:
            await peer.ping()
    assert counted.grown == 1


async def test_connections_are_counted() -> None:
    before = since("baton_http2_connections")
    async with echoing() as server:
        async with peer_of(server.port) as peer:
            await peer.ping()
            assert before.grown == 1
        await eventually(lambda: before.grown == 0)


async def test_a_peer_that_does_not_answer_a_ping_is_gone() -> None:
    limits = {"keepalive_seconds": 0.1, "keepalive_timeout_seconds": 0.2}
    async with echoing(**limits) as server, peer_of(server.port) as peer:
        await peer.call(1, "hang", b"x")
        await eventually(lambda: server.seen.started == 1)
        # What comes is not read here, and so not answered.
        await eventually(lambda: server.seen.cancelled == 1)


async def test_a_peer_that_answers_pings_stays() -> None:
    limits = {"keepalive_seconds": 0.05, "keepalive_timeout_seconds": 0.2}
    async with echoing(**limits) as server, peer_of(server.port) as peer:
        await peer.until(lambda: sum(isinstance(each, PingFrame) for each in peer.frames) >= 5)
        await peer.call(1, "unary", b"x")
        assert (await peer.ended(1)).messages == [b"x"]


async def test_a_peer_that_pings_too_often_is_told_so() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        for _ in range(4):
            await peer.send(PingFrame(opaque_data=b"12345678"))
        assert await peer.closed() == ENHANCE_YOUR_CALM
        assert peer.goaway is not None
        assert peer.goaway.additional_data == b"too_many_pings"


async def test_pings_beside_answers_are_no_nuisance() -> None:
    async with echoing() as server, peer_of(server.port) as peer:
        for stream_id in range(1, 41, 2):
            await peer.call(stream_id, "unary", b"x")
            await peer.ended(stream_id)
            await peer.ping()


async def test_a_connection_of_its_age_is_drained_in_two_steps_and_its_calls_go_on() -> None:
    async with echoing(max_age_seconds=1.0) as server, peer_of(server.port) as peer:
        await peer.call(1, "bidi", b"before", end=False)
        await peer.until(lambda: len(peer.goaways) == 2)
        assert [each.last_stream_id for each in peer.goaways] == [2**31 - 1, 1]
        assert {each.error_code for each in peer.goaways} == {0}
        await peer.send(DataFrame(1, message(b"after"), flags=["END_STREAM"]))
        assert (await peer.ended(1)).messages == [b"before", b"after"]
        assert await peer.closed() == 0


async def test_a_call_after_the_last_goaway_is_refused() -> None:
    async with echoing(max_age_seconds=1.0) as server, peer_of(server.port) as peer:
        await peer.call(1, "bidi", b"x", end=False)
        await peer.until(lambda: len(peer.goaways) == 2)
        await peer.call(3, "unary", b"x")
        assert (await peer.ended(3)).reset == 7


async def test_a_stream_that_is_not_read_is_reset_and_the_others_go_on() -> None:
    counted = since(EXCEEDED, budget="slow_reader")
    async with echoing(Http2Limits(slow_reader_seconds=0.2)) as server, peer_of(server.port) as peer:
        await peer.send(SettingsFrame(settings={4: 10}))
        await peer.call(1, "large", b"1000")
        assert (await peer.ended(1)).reset == ENHANCE_YOUR_CALM
        await peer.call(3, "unary", b"hi")
        assert (await peer.ended(3)).messages == [b"hi"]
    assert counted.grown == 1


async def test_a_stream_that_is_read_slowly_goes_on() -> None:
    async with echoing(Http2Limits(slow_reader_seconds=2.0)) as server, peer_of(server.port) as peer:
        await peer.send(SettingsFrame(settings={4: 10}))
        await peer.call(1, "large", b"100")
        for _ in range(10):
            await asyncio.sleep(0.3)
            await peer.send(opened(1, 10))
        assert len((await peer.ended(1)).data) == 105


async def test_writers_that_wait_for_the_others_of_their_connection_all_go_on() -> None:
    limits = Http2Limits(max_unread_output_bytes=65_536)
    async with echoing(limits) as server, peer_of(server.port) as peer:
        await peer.send(SettingsFrame(settings={4: 0}))
        streams = range(1, 301, 2)
        for stream_id in streams:
            await peer.call(stream_id, "count", b"200")
        (connection,) = server.server.connections.open
        await eventually(lambda: connection.output.waiting_bytes >= 65_536)
        await peer.ping()
        assert connection.output.waiting_bytes < 2 * 65_536
        await peer.send(opened(0, 2**30), SettingsFrame(settings={4: 2**20}))
        for stream_id in streams:
            assert len((await peer.ended(stream_id)).messages) == 200


async def test_a_stream_that_is_read_goes_on_beside_others_that_are_not() -> None:
    limits = Http2Limits(max_unread_output_bytes=65_536)
    async with echoing(limits) as server, peer_of(server.port) as peer:
        await peer.send(SettingsFrame(settings={4: 0}))
        for stream_id in range(1, 41, 2):
            await peer.call(stream_id, "endless", bytes(10_000))
        (connection,) = server.server.connections.open
        await eventually(lambda: connection.output.waiting_bytes >= 65_536)
        await peer.call(101, "count", b"500", end=False)
        await peer.send(opened(101, 2**20), DataFrame(101, flags=["END_STREAM"]))
        assert len((await peer.ended(101)).messages) == 500


async def repeated(peer: Peer, frame: Frame) -> None:
    while True:
        await peer.send(frame)
        await asyncio.sleep(0.1)


async def test_a_stream_that_is_opened_ever_more_and_takes_nothing_is_reset() -> None:
    async with echoing(Http2Limits(slow_reader_seconds=1.0)) as server, peer_of(server.port) as peer:
        await peer.send(SettingsFrame(settings={4: 2**20}))
        await peer.call(1, "large", b"100000")  # more than its connection's window, which stays closed
        opening = asyncio.create_task(repeated(peer, opened(1, 1)))
        assert (await peer.ended(1)).reset == ENHANCE_YOUR_CALM
        opening.cancel()


async def test_a_connection_that_is_written_to_and_takes_nothing_is_closed() -> None:
    counted = since(EXCEEDED, budget="slow_reader")
    async with echoing(Http2Limits(slow_reader_seconds=1.0)) as server, peer_of(server.port) as peer:
        await peer.send(opened(0, 2**30), SettingsFrame(settings={4: 2**30}))
        await peer.call(1, "endless", bytes(60_000))
        # Each is acknowledged.
        asking = asyncio.create_task(repeated(peer, SettingsFrame(settings={4: 2**30})))
        await eventually(lambda: counted.grown == 1)
        asking.cancel()


async def test_a_connection_that_is_not_read_is_closed() -> None:
    async with echoing(Http2Limits(slow_reader_seconds=0.2)) as server, peer_of(server.port) as peer:
        await peer.send(opened(0, 2**30), SettingsFrame(settings={4: 2**30}))
        await peer.call(1, "endless", bytes(60_000))
        await eventually(lambda: not server.server.connections.open, 10)


async def test_requests_that_wait_to_be_read_are_bounded_together() -> None:
    counted = since(EXCEEDED, budget="unread_input")
    limits = Http2Limits(max_unread_input_bytes=100_000)
    async with echoing(limits, max_message_bytes=10**6) as server, peer_of(server.port) as peer:
        start = (0).to_bytes(1, "big") + (900_000).to_bytes(4, "big")
        for stream_id in (1, 3, 5):
            await peer.call(stream_id, "unary", end=False)
            await peer.send(DataFrame(stream_id, start), *[DataFrame(stream_id, bytes(16_000))] * 3)
        assert (await peer.ended(5)).status == 8
        await peer.call(7, "unary", b"hi")
        assert (await peer.ended(7)).messages == [b"hi"]
    assert counted.grown == 1


async def test_each_rate_is_a_setting() -> None:
    few = Rate(burst=2, per_second=0)
    limits = Http2Limits(resets=few, empty_frames=few, settings=few, pings=few, priorities=few, window_updates=few)
    wrong = {
        "resets": b"".join(b"\0\0\4\3\0\0\0\0\1" + bytes(4) for _ in range(3)),
        "empty_frames": b"\0\0\0\x77\0\0\0\0\0" * 3,
        "settings": SettingsFrame().serialize() * 2,
        "pings": PingFrame(opaque_data=b"12345678").serialize() * 3,
        "priorities": b"\0\0\5\2\0\0\0\0\3" + bytes(5) + (b"\0\0\5\2\0\0\0\0\3" + bytes(5)) * 2,
        "window_updates": opened(0, 1).serialize() * 3,
    }
    for budget, frames in wrong.items():
        counted = since(EXCEEDED, budget=budget)
        async with echoing(limits) as server, peer_of(server.port) as peer:
            await peer.call(1, "hang", b"x")
            await peer.send(frames)
            assert await peer.closed() == ENHANCE_YOUR_CALM, budget
        assert counted.grown == 1, budget


async def test_a_window_is_earned_by_what_is_read() -> None:
    limits = Http2Limits(window_updates=Rate(burst=10, per_second=0))
    async with echoing(limits) as server, peer_of(server.port) as peer:
        for stream_id in range(1, 201, 2):
            await peer.call(stream_id, "unary", b"a token of some length, as they are")
            await peer.ended(stream_id)
            await peer.send(opened(0, 40), opened(stream_id, 40))
        await peer.ping()
