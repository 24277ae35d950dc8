"""Attacks that have brought HTTP/2 servers down: each attack is ended, with its reason, in bounded memory."""

from collections.abc import Iterator

import pytest
from support.http2.attacks import ATTACKS, MEMORY_BYTES, cpu_seconds
from support.http2.peer import peer_of
from support.http2.process import ServerProcess, server_process


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as process:
        yield process


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_ended_with_its_reason(server: ServerProcess, name: str) -> None:
    await cpu_seconds(server, name)


async def test_answers_that_are_not_read_are_bounded(server: ServerProcess) -> None:
    async with peer_of(server.port, INITIAL_WINDOW_SIZE=0) as peer:
        await peer.ping()
        before = server.memory_bytes()
        for stream_id in range(1, 401, 2):
            await peer.call(stream_id, "endless", bytes(60_000))
        await peer.until(lambda: sum(bool(answer.headers) for answer in peer.answers.values()) > 30)
        await peer.ping()
        assert server.memory_bytes() - before < MEMORY_BYTES
