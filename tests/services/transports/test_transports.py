"""All transports: right bytes, refused requests, and no writes after the end of a pull."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.certificates import worker_tls
from support.clients.worker_calls import WorkerCalls, decode_request
from support.cluster.workers import Running, Starter
from support.servers.tcp_proxy import TcpProxy
from support.transports.grants import HANDOFF_ID
from support.transports.nixl import NIXL
from support.transports.pools import offered

from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc
from rpc.health import Health
from rpc.server import Service, serve
from runtime.aio import timeout
from services.engines.kv import BlockWriter
from services.engines.memory.shared_pool import SharedPool
from services.transports.base import PoolReader, PoolShape, Transfer, TransferFailed, Transport, TransportUnavailable
from services.transports.frames import COUNT, ID_LENGTH, MAGIC, receive_exactly
from services.transports.registry import open_transports

BLOCKS = 256
BLOCK_BYTES = 16 * 1024
NAMES = ("shm", NIXL, "tcp", "tls")


@dataclass(frozen=True)
class Wire:
    """A pool full of random bytes, an empty one, and a transport between them."""

    theirs: SharedPool
    ours: SharedPool
    endpoint: handoff_pb2.TransportEndpoint
    transport: Transport
    reader: PoolReader

    async def pull(self, source: list[int], destination: list[int], seconds: float = 20) -> None:
        await self.reader.pull(Transfer(source, self.ours, destination, time.monotonic() + seconds, HANDOFF_ID))

    def wrong(self, source: list[int], destination: list[int]) -> list[int]:
        pairs = zip(source, destination, strict=True)
        return [ours for theirs, ours in pairs if self.ours.block(ours) != self.theirs.block(theirs)]


@pytest.fixture
def pools() -> Iterator[tuple[SharedPool, SharedPool]]:
    with SharedPool(BLOCKS, BLOCK_BYTES) as theirs, SharedPool(BLOCKS, BLOCK_BYTES) as ours:
        theirs.block(0).obj[:] = random.Random(3).randbytes(BLOCKS * BLOCK_BYTES)
        yield theirs, ours


@pytest.fixture(params=NAMES)
async def wire(
    request: pytest.FixtureRequest, pools: tuple[SharedPool, SharedPool], tmp_path: Path
) -> AsyncIterator[Wire]:
    """`tls` is tcp between workers with certificates."""
    theirs, ours = pools
    name, tls = ("tcp", worker_tls(tmp_path)) if request.param == "tls" else (request.param, None)
    async with offered(theirs, (name,), tls) as [endpoint], open_transports((name,), tls=tls) as [transport]:
        reader = await transport.open(endpoint, PoolShape(BLOCKS, BLOCK_BYTES))
        yield Wire(theirs, ours, endpoint, transport, reader)
        reader.close()


@pytest.mark.parametrize("count", [1, 7, 200, BLOCKS])
async def test_permuted_blocks_arrive_byte_for_byte(wire: Wire, count: int) -> None:
    source, destination = random.sample(range(BLOCKS), count), random.sample(range(BLOCKS), count)
    await wire.pull(source, destination)
    assert wire.wrong(source, destination) == []


async def test_contiguous_blocks_arrive_byte_for_byte(wire: Wire) -> None:
    source, destination = list(range(20, 220)), list(range(3, 203))
    await wire.pull(source, destination)
    assert wire.wrong(source, destination) == []


async def test_nothing_else_is_written(wire: Wire) -> None:
    await wire.pull([9, 3, 4], [100, 7, 8])
    empty = bytes(BLOCK_BYTES)
    assert [block for block in range(BLOCKS) if wire.ours.block(block) != empty] == [7, 8, 100]


async def test_many_pulls_at_once_do_not_disturb_one_another(wire: Wire) -> None:
    ids = random.sample(range(BLOCKS), BLOCKS)
    parts = [ids[start : start + 16] for start in range(0, BLOCKS, 16)]
    await asyncio.gather(*(wire.pull(part, sorted(part)) for part in parts))
    for part in parts:
        assert wire.wrong(part, sorted(part)) == []


async def test_a_pull_that_is_too_late_fails(wire: Wire) -> None:
    with pytest.raises(TransferFailed):
        await wire.pull([1], [2], seconds=-1)


class GatedPool(SharedPool):
    """Blocks whose writer waits for the test: a barrier in the transport's thread, before its first byte."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, BLOCK_BYTES)
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def write(self, block_ids: Sequence[int]) -> BlockWriter:
        self.reached.set()
        assert self.let_go.wait(20)
        return super().write(block_ids)


@pytest.fixture
def gated() -> Iterator[GatedPool]:
    with GatedPool() as pool:
        yield pool


async def cancelled_at_the_gate(wire: Wire, gated: GatedPool) -> "asyncio.Task[None]":
    """A pull of everything, whose thread is about to write, and which has just been cancelled."""
    ids = list(range(BLOCKS))
    task = asyncio.create_task(wire.reader.pull(Transfer(ids, gated, ids, time.monotonic() + 20, HANDOFF_ID)))
    assert await asyncio.to_thread(gated.reached.wait, 20)
    task.cancel()
    for _ in range(50):
        await asyncio.sleep(0)
    return task


async def test_a_cancelled_pull_has_not_ended_while_its_thread_may_still_write(wire: Wire, gated: GatedPool) -> None:
    task = await cancelled_at_the_gate(wire, gated)
    assert not task.done()
    gated.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_pull_does_not_write_what_it_has_not_begun(wire: Wire, gated: GatedPool) -> None:
    task = await cancelled_at_the_gate(wire, gated)
    gated.let_go.set()
    await asyncio.gather(task, return_exceptions=True)
    assert gated.block(BLOCKS - 1) == bytes(BLOCK_BYTES)


async def test_a_pull_after_one_that_was_cancelled_is_right(wire: Wire, gated: GatedPool) -> None:
    task = await cancelled_at_the_gate(wire, gated)
    gated.let_go.set()
    await asyncio.gather(task, return_exceptions=True)
    ids = list(range(BLOCKS))
    await wire.pull(ids[:20], ids[-20:])
    assert wire.wrong(ids[:20], ids[-20:]) == []


async def test_a_pull_that_is_cancelled_before_it_has_begun_disturbs_no_other(wire: Wire) -> None:
    ids = list(range(BLOCKS))
    for rounds in range(4):
        task = asyncio.create_task(wire.pull(ids, ids))
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await wire.pull(ids[:20], ids[-20:])
    assert wire.wrong(ids[:20], ids[-20:]) == []


@pytest.fixture
async def tcp(pools: tuple[SharedPool, SharedPool]) -> AsyncIterator[Wire]:
    theirs, ours = pools
    async with offered(theirs, ("tcp",)) as [endpoint], open_transports(("tcp",)) as [transport]:
        reader = await transport.open(endpoint, PoolShape(BLOCKS, BLOCK_BYTES))
        yield Wire(theirs, ours, endpoint, transport, reader)
        reader.close()


def _answer_to(endpoint: handoff_pb2.TransportEndpoint, *said: bytes) -> bytes:
    """Returns the owner's answer to raw bytes; nothing if it closes the connection."""
    with socket.create_connection((endpoint.tcp.host, endpoint.tcp.port), timeout=60) as connection:
        for part in said:
            connection.sendall(part)
        try:
            return connection.recv(64)
        except ConnectionResetError:
            return b""


NAMED = ID_LENGTH.pack(len(HANDOFF_ID)) + HANDOFF_ID.encode()
ONE_BLOCK = NAMED + COUNT.pack(1) + (5).to_bytes(4, "little")


async def test_a_reader_with_the_token_is_answered(tcp: Wire) -> None:
    answer = await asyncio.to_thread(_answer_to, tcp.endpoint, MAGIC + tcp.endpoint.tcp.token, ONE_BLOCK)
    assert COUNT.unpack(answer[: COUNT.size]) == (BLOCK_BYTES,)


@pytest.mark.parametrize("hello", [MAGIC + bytes(32), b"GET / HTTP/1.1\r\n" + bytes(24)])
async def test_a_reader_without_the_token_is_disconnected(tcp: Wire, hello: bytes) -> None:
    assert await asyncio.to_thread(_answer_to, tcp.endpoint, hello, ONE_BLOCK) == b""


@pytest.mark.parametrize(
    "question",
    [COUNT.pack(1) + BLOCKS.to_bytes(4, "little"), COUNT.pack(2**63), COUNT.pack(0), COUNT.pack(BLOCKS + 1)],
)
async def test_the_owner_disconnects_a_reader_that_asks_for_unknown_blocks(tcp: Wire, question: bytes) -> None:
    said = (MAGIC + tcp.endpoint.tcp.token, NAMED + question)
    assert await asyncio.to_thread(_answer_to, tcp.endpoint, *said) == b""


async def test_a_connection_is_used_again(pools: tuple[SharedPool, SharedPool]) -> None:
    theirs, ours = pools
    async with (
        offered(theirs, ("tcp",)) as [endpoint],
        TcpProxy(f"127.0.0.1:{endpoint.tcp.port}") as proxy,
        open_transports(("tcp",)) as [transport],
    ):
        endpoint.tcp.port = int(proxy.address.rpartition(":")[2])
        reader = await transport.open(endpoint, PoolShape(BLOCKS, BLOCK_BYTES))
        for _ in range(3):
            await reader.pull(Transfer([1, 2], ours, [3, 4], time.monotonic() + 20, HANDOFF_ID))
        reader.close()
        assert proxy.accepted == 1


async def test_an_owner_that_goes_away_in_the_middle_fails_the_pull(pools: tuple[SharedPool, SharedPool]) -> None:
    _, ours = pools

    async def promise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(MAGIC + NAMED) + COUNT.size + 4)
        writer.write(COUNT.pack(BLOCK_BYTES) + b"too little")
        writer.close()

    server = await asyncio.start_server(promise, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = handoff_pb2.TransportEndpoint(tcp=handoff_pb2.TcpEndpoint(host="127.0.0.1", port=port))
    async with server, timeout(10), open_transports(("tcp",)) as [transport]:
        reader = await transport.open(endpoint, PoolShape(BLOCKS, BLOCK_BYTES))
        with pytest.raises(TransferFailed):
            await reader.pull(Transfer([1], ours, [2], time.monotonic() + 5, HANDOFF_ID))


async def test_a_silent_owner_fails_the_pull_at_its_deadline(pools: tuple[SharedPool, SharedPool]) -> None:
    _, ours = pools
    async with open_transports(("tcp",)) as [transport]:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            tcp = handoff_pb2.TcpEndpoint(host="127.0.0.1", port=silent.getsockname()[1])
            reader = await transport.open(handoff_pb2.TransportEndpoint(tcp=tcp), PoolShape(BLOCKS, BLOCK_BYTES))
            started = time.monotonic()
            with pytest.raises(TransferFailed):
                await reader.pull(Transfer([1], ours, [2], time.monotonic() + 0.3, HANDOFF_ID))
            assert time.monotonic() - started < 20


async def test_cancelling_a_pull_from_a_silent_owner_ends_it_at_once(pools: tuple[SharedPool, SharedPool]) -> None:
    _, ours = pools
    async with open_transports(("tcp",)) as [transport]:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            tcp = handoff_pb2.TcpEndpoint(host="127.0.0.1", port=silent.getsockname()[1])
            reader = await transport.open(handoff_pb2.TransportEndpoint(tcp=tcp), PoolShape(BLOCKS, BLOCK_BYTES))
            task = asyncio.create_task(reader.pull(Transfer([1], ours, [2], time.monotonic() + 60, HANDOFF_ID)))
            asking, _ = await asyncio.to_thread(silent.accept)
            with asking:
                await asyncio.to_thread(receive_exactly, asking, len(MAGIC + ONE_BLOCK))
                task.cancel()
                async with timeout(20):
                    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_id", "another host"),
        ("host_id", ""),
        ("path", "/proc/1/fd/999999"),
        ("path", "/etc/hostname"),
        ("size", BLOCK_BYTES),
    ],
)
async def test_a_pool_that_cannot_be_mapped_is_unavailable(
    pools: tuple[SharedPool, SharedPool], field: str, value: object
) -> None:
    async with offered(pools[0], ("shm",)) as [endpoint]:
        setattr(endpoint.shm, field, value)
        async with open_transports(("shm",)) as [transport]:
            with pytest.raises(TransportUnavailable):
                await transport.open(endpoint, PoolShape(BLOCKS, BLOCK_BYTES))


async def test_a_mapped_pool_stays_readable_when_its_owner_has_closed_it() -> None:
    with SharedPool(4, BLOCK_BYTES) as ours, ExitStack() as owner:
        theirs = owner.enter_context(SharedPool(4, BLOCK_BYTES))
        theirs.block(2)[:] = b"x" * BLOCK_BYTES
        async with offered(theirs, ("shm",)) as [endpoint], open_transports(("shm",)) as [transport]:
            reader = await transport.open(endpoint, PoolShape(4, BLOCK_BYTES))
            owner.close()
            await reader.pull(Transfer([2], ours, [1], time.monotonic() + 5, HANDOFF_ID))
            assert bytes(ours.block(1)) == b"x" * BLOCK_BYTES


async def test_a_worker_reads_by_the_owners_first_choice_that_it_supports(start: Starter) -> None:
    async with start("prefill", transports=("tcp", "shm")) as prefill, start("decode") as decode:
        assert (await decode.calls.decode(decode_request(await prefill.calls.prefill()))).transport == "tcp"


async def test_a_worker_falls_back_to_what_it_supports(prefill: Running, start: Starter) -> None:
    async with start("decode", transports=("tcp",)) as decode:
        assert (await decode.calls.decode(decode_request(await prefill.calls.prefill()))).transport == "tcp"


class Elsewhere(handoff_pb2_grpc.HandoffServiceServicer):
    """Passes calls on to an owner, and reports its memory as another host's."""

    def __init__(self, owner: WorkerCalls) -> None:
        self._owner = owner

    async def GetPool(self, request: handoff_pb2.GetPoolRequest, context: object) -> handoff_pb2.GetPoolResponse:
        offer: handoff_pb2.GetPoolResponse = await self._owner.handoffs.GetPool(request)
        offer.endpoints[0].shm.host_id = "elsewhere"
        return offer

    async def Release(self, request: handoff_pb2.ReleaseRequest, context: object) -> handoff_pb2.ReleaseResponse:
        answer: handoff_pb2.ReleaseResponse = await self._owner.handoffs.Release(request)
        return answer


async def test_memory_of_another_host_is_read_by_tcp(prefill: Running, decode: Running) -> None:
    service = Service(
        "baton.engine.v1.HandoffService",
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server,
        Elsewhere(prefill.calls),
    )
    async with serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0) as elsewhere:
        handoff = await prefill.calls.prefill()
        handoff.address = elsewhere.address
        assert (await decode.calls.decode(decode_request(handoff))).transport == "tcp"
