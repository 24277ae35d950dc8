"""The cost of attacks on a server until they are ended, and their effect on other clients."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest
from grpc import aio
from support.calibration import here
from support.http2.attacks import ATTACKS, attack, cpu_seconds
from support.http2.peer import peer_of
from support.http2.process import ServerProcess, server_process
from support.http2.server import path

CPU_SECONDS = 0.05
TRIES = 5


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as process:
        yield process


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_ended_for_little(server: ServerProcess, name: str) -> None:
    # Other work on this machine only ever adds to the CPU time: one try within the bound shows that it is kept.
    for _ in range(10):
        if (spent := await cpu_seconds(server, name)) < (most := here(CPU_SECONDS)):
            return
    pytest.fail(f"{spent:.3f} s of CPU, and no try of ten below {most:.3f}")


async def gaps(server: ServerProcess, seconds: float, ended: asyncio.Event) -> list[float]:
    """From message to message of a stream, by the server's clock: the attacker keeps this process busy too.

    It lasts until `ended` is set, and `seconds` at least.
    """
    written = []
    async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_stream(path("ticks"))(b"")
        while not written or written[-1] - written[0] < seconds or not ended.is_set():
            written.append(float(await call.read()))
    return [after - before for before, after in pairwise(written)]


async def felt(server: ServerProcess, attacked: ServerProcess) -> float:
    """The 99th percentile of the gaps of a stream of `server` while `attacked` gets each of the attacks."""
    ended = asyncio.Event()
    watching = asyncio.create_task(gaps(server, 4, ended))
    for chunks in ATTACKS.values():
        async with peer_of(attacked.port) as peer:
            await attack(peer, chunks())
    ended.set()
    values = sorted(await watching)
    return values[int(len(values) * 0.99)]


@pytest.mark.slow
async def test_others_do_not_feel_the_attacks(server: ServerProcess) -> None:
    # The attacker's work, and that of others on this machine, delays both: one try within the bound shows that what
    # the server does about the attacks delays nothing.
    seen = []
    with server_process() as another:
        for _ in range(TRIES):
            elsewhere, own = await felt(server, another), await felt(server, server)
            if own < 2 * elsewhere + 0.005:
                return
            seen.append(f"{own * 1000:.1f} ms, and {elsewhere * 1000:.1f} ms while another server is attacked")
    pytest.fail("; ".join(seen))
