"""The cases of the conformance tool h2spec, by its own numbers, each over a connection of its own.

All 147 are tried by name: 143 in the table, and at the end of the file those that need more than frames and a reaction.
h2spec itself (`h2spec -S -P /test.Echo/bidi -p PORT`) passes against `python -m support.http2.server`, which CI cannot
build.
"""

import pytest
from hyperframe.frame import SettingsFrame
from support.http2.h2spec import CASES, Alive, Answered, Ended, Reset
from support.http2.peer import Peer, opened, peer_of, silent_peer
from support.http2.server import echoing


async def send(peer: Peer, name: str) -> None:
    for step in CASES[name][0](peer):
        if isinstance(step, int):
            await peer.ended(step)
        else:
            await peer.send(step)


@pytest.mark.parametrize("name", CASES)
async def test_the_server_reacts_as_h2spec_asks(name: str) -> None:
    async with echoing(max_streams=2) as server, peer_of(server.port) as peer:
        await send(peer, name)
        match CASES[name][1]:
            case Answered(status, stream):
                assert (await peer.ended(stream)).headers[0][":status"] == status
            case Alive():
                await peer.ping()
            case Reset(code, stream):
                await peer.until(lambda: peer.answer(stream).reset is not None)
                assert peer.answer(stream).reset == code
                await peer.ping()
            case Ended(code):
                assert await peer.closed() == code


async def test_http2_3_5_2_an_invalid_preface() -> None:
    async with echoing() as server, silent_peer(server.port) as peer:
        await peer.send(b"INVALID CONNECTION PREFACE\r\n\r\n")
        assert await peer.closed() == 1


async def test_http2_6_9_1_1_a_window_of_one_byte() -> None:
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=1) as peer:
        await peer.call(1, "unary", b"hello")
        await peer.until(lambda: bool(peer.answer(1).data))
        await peer.ping()
        assert peer.answer(1).data_frames == [1]


async def test_http2_6_9_2_1_a_window_that_settings_change_after_the_request() -> None:
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=0) as peer:
        await peer.call(1, "unary", b"hello")
        await peer.ping()
        assert peer.answer(1).data_frames == []
        await peer.send(SettingsFrame(settings={4: 1}))
        await peer.until(lambda: bool(peer.answer(1).data))
        await peer.ping()
        assert peer.answer(1).data_frames == [1]


async def test_http2_6_9_2_2_a_window_that_settings_make_negative() -> None:
    async with echoing() as server, peer_of(server.port, INITIAL_WINDOW_SIZE=3) as peer:
        await peer.call(1, "unary", b"hello")
        await peer.until(lambda: len(peer.answer(1).data) == 3)
        await peer.send(SettingsFrame(settings={4: 2}), opened(1, 1))  # to -1, and to 0
        await peer.ping()
        assert peer.answer(1).data_frames == [3]
        await peer.send(opened(1, 1))
        await peer.until(lambda: len(peer.answer(1).data) == 4)
        await peer.ping()
        assert peer.answer(1).data_frames == [3, 1]
