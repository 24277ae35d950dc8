"""The memory of answers that nobody reads: a budget of the process, and the slowest readers end where it is used up."""

import asyncio
from contextlib import AsyncExitStack

from hyperframe.frame import SettingsFrame
from support.clients.scraping import since
from support.eventually import eventually
from support.http2.peer import Peer, opened, peer_of
from support.http2.server import Echoing, echoing

EXCEEDED = "baton_http2_budget_exceeded_total"
ENHANCE_YOUR_CALM = 11
MIB = 2**20


def unread(server: Echoing) -> int:
    return sum(connection.output.unread_bytes for connection in server.server.connections.open)


async def ask_and_read_little(peer: Peer, *sizes: int) -> None:
    """Asks for answers of so many bytes, and lets 10 of each be sent."""
    await peer.send(SettingsFrame(settings={4: 10}))
    for number, size in enumerate(sizes):
        await peer.call(2 * number + 1, "large", str(size).encode())


async def test_answers_that_are_not_read_end_when_all_of_them_use_too_much_memory() -> None:
    counted = since(EXCEEDED, budget="unread_output")
    async with echoing(unread_output_bytes=8 * MIB) as server, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(peer_of(server.port)) for _ in range(6)]
        for peer in peers:
            await ask_and_read_little(peer, 3 * MIB)
        await eventually(lambda: counted.grown >= 4)
        await eventually(lambda: unread(server) <= 8 * MIB)
        ended = [peer for peer in peers if not await is_running(peer)]
        assert {(await peer.ended(1)).reset for peer in ended} == {ENHANCE_YOUR_CALM}
        assert 4 <= len(ended) < 6


async def is_running(peer: Peer) -> bool:
    await peer.ping()
    return peer.answer(1).reset is None


async def test_answers_that_wait_to_be_written_count_with_their_whole_size() -> None:
    async with echoing(unread_output_bytes=32 * MIB) as server, peer_of(server.port) as peer:
        await ask_and_read_little(peer, *[8 * MIB] * 6)
        answers = [await peer.ended(2 * number + 1) for number in range(6)]
        assert {answer.reset for answer in answers} == {ENHANCE_YOUR_CALM}


async def test_a_client_that_reads_goes_on_while_others_end() -> None:
    counted = since(EXCEEDED, budget="unread_output")
    async with echoing(unread_output_bytes=8 * MIB) as server, AsyncExitStack() as stack:
        reader = await stack.enter_async_context(peer_of(server.port))
        await reader.send(opened(0, 2**30), SettingsFrame(settings={4: 2**30}))
        await reader.call(1, "endless", bytes(10_000))
        for _ in range(6):
            peer = await stack.enter_async_context(peer_of(server.port))
            await ask_and_read_little(peer, 3 * MIB)
        reading = asyncio.create_task(reader.until(lambda: counted.grown >= 4))
        await reading
        came = len(reader.answer(1).data)
        await reader.until(lambda: len(reader.answer(1).data) > came + MIB)
        assert reader.answer(1).reset is None


async def test_connections_that_are_not_read_at_all_end_too() -> None:
    counted = since(EXCEEDED, budget="unread_output")
    async with echoing(unread_output_bytes=MIB) as server, AsyncExitStack() as stack:
        for _ in range(8):
            peer = await stack.enter_async_context(peer_of(server.port))
            await peer.send(opened(0, 2**30), SettingsFrame(settings={4: 2**30}))
            await peer.call(1, "endless", bytes(60_000))
        await eventually(lambda: counted.grown >= 2)
        await eventually(lambda: unread(server) <= MIB)
        await eventually(lambda: len(server.server.connections.open) < 8)


async def test_a_client_that_reads_byte_by_byte_is_slower_than_one_that_has_paused_for_a_moment() -> None:
    async with echoing(unread_output_bytes=8 * MIB) as server, AsyncExitStack() as stack:
        drips = [await stack.enter_async_context(peer_of(server.port)) for _ in range(3)]
        for peer in drips:
            await ask_and_read_little(peer, 2 * MIB)
        reader = await stack.enter_async_context(peer_of(server.port))
        await ask_and_read_little(reader, 5 * MIB)
        for _ in range(200):
            for peer in drips:
                await peer.send(opened(1, 1))
            await reader.send(opened(0, 4000), opened(1, 4000))
            if any(each.reset is not None for peer in drips for each in peer.answers.values()):
                break
            for peer in (*drips, reader):
                await peer.ping()
        assert reader.answer(1).reset is None
