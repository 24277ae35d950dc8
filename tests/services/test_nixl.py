"""The nixl transport: who may connect, what cannot be read, and reads that are given up while NIXL goes on."""

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from baton.engine.v1 import handoff_pb2
from support.nixl import needs_nixl
from support.worker_calls import decode_request
from support.workers import Starter

from rpc.aio import timeout
from rpc.errors import ConfigError
from rpc.tls import TlsConfig, TlsSection
from services.config import NixlConfig, WorkerConfig
from services.engines.scratch import Scratch
from services.engines.shared_pool import SharedPool
from services.host import host_worker
from services.transports import nixl_agent
from services.transports.factory import Exposure, offer_pool, open_transports
from services.transports.transport import Transfer, TransferFailed, TransportUnavailable

pytestmark = needs_nixl

BLOCKS = 64
BLOCK_BYTES = 256 * 1024
EXPOSURE = Exposure("127.0.0.1", "127.0.0.1")


@pytest.fixture
def ours() -> Iterator[SharedPool]:
    with SharedPool(BLOCKS, BLOCK_BYTES) as pool:
        yield pool


def _is_empty(pool: SharedPool) -> bool:
    return bytes(pool.block(0).obj) == bytes(BLOCKS * BLOCK_BYTES)


def _offer(pipe: Connection) -> None:
    """The process of an owner, whose blocks are full of ones."""

    async def serve() -> None:
        with SharedPool(BLOCKS, BLOCK_BYTES) as pool:
            pool.block(0).obj[:] = b"\x01" * (BLOCKS * BLOCK_BYTES)
            async with offer_pool(pool, ("nixl",), EXPOSURE) as [endpoint]:
                pipe.send(endpoint.SerializeToString())
                await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


@dataclass(frozen=True)
class Owner:
    """An owner in a process of its own."""

    process: BaseProcess
    endpoint: handoff_pb2.TransportEndpoint

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@asynccontextmanager
async def _owner() -> AsyncIterator[Owner]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_offer, args=(there,))
    process.start()
    try:
        text = await asyncio.to_thread(here.recv)
        yield Owner(process, handoff_pb2.TransportEndpoint.FromString(text))
    finally:
        process.kill()
        process.join()


def _transfer(pool: SharedPool, seconds: float = 20) -> Transfer:
    return Transfer(range(BLOCKS), pool, range(BLOCKS), time.monotonic() + seconds)


async def test_an_owner_that_was_killed_fails_the_pull_at_once(ours: SharedPool) -> None:
    async with _owner() as owner:
        with open_transports(("nixl",)) as [transport]:
            reader = await transport.open(owner.endpoint, BLOCKS, BLOCK_BYTES)
            owner.process.kill()
            owner.process.join()
            async with timeout(5):
                with pytest.raises(TransferFailed):
                    await reader.pull(_transfer(ours))
            with pytest.raises(TransportUnavailable):
                await transport.open(owner.endpoint, BLOCKS, BLOCK_BYTES)
            assert _is_empty(ours)
            reader.close()


async def test_an_owner_that_is_killed_in_the_middle_fails_the_pull_or_came_too_late(ours: SharedPool) -> None:
    async with _owner() as owner:
        with open_transports(("nixl",)) as [transport]:
            reader = await transport.open(owner.endpoint, BLOCKS, BLOCK_BYTES)
            pulls = [asyncio.create_task(reader.pull(_transfer(ours))) for _ in range(50)]
            await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
            owner.process.kill()
            async with timeout(10):
                outcomes = await asyncio.gather(*pulls, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {type(None), TransferFailed}
            reader.close()


async def test_a_pull_from_a_frozen_owner_is_right_or_fails_at_its_deadline(ours: SharedPool) -> None:
    async with _owner() as owner:
        with open_transports(("nixl",)) as [transport]:
            reader = await transport.open(owner.endpoint, BLOCKS, BLOCK_BYTES)
            owner.signal(signal.SIGSTOP)
            async with timeout(3):
                [outcome] = await asyncio.gather(reader.pull(_transfer(ours, 0.5)), return_exceptions=True)
            arrived = bytes(ours.block(BLOCKS - 1)) == b"\x01" * BLOCK_BYTES
            assert arrived if outcome is None else isinstance(outcome, TransferFailed)
            reader.close()


@pytest.fixture
def only_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that UCX has, TCP: which has no reads, and copies them into messages only if it is told to."""
    monkeypatch.setenv("UCX_TLS", "tcp")


async def test_a_pool_that_ucx_could_read_by_messages_only_is_unavailable(only_messages: None) -> None:
    async with _owner() as owner:
        with open_transports(("nixl",)) as [transport], pytest.raises(TransportUnavailable):
            await transport.open(owner.endpoint, BLOCKS, BLOCK_BYTES)


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_read_that_was_given_up_while_its_owner_was_frozen_never_writes_into_a_block(
    ours: SharedPool, only_messages: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    # The only way here to have a read that is pending: its owner must answer, and does so as soon as it wakes.
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")
    async with _owner() as owner:
        with open_transports(("nixl",)) as [transport]:
            reader = await transport.open(owner.endpoint, BLOCKS, BLOCK_BYTES)
            owner.signal(signal.SIGSTOP)
            pulling = asyncio.create_task(reader.pull(_transfer(ours, 0.3 if how == "late" else 20)))
            await asyncio.wait([pulling], timeout=0.2)
            assert not pulling.done()
            async with timeout(3):
                if how == "cancelled":
                    pulling.cancel()
                [outcome] = await asyncio.gather(pulling, return_exceptions=True)
            assert isinstance(outcome, asyncio.CancelledError if how == "cancelled" else TransferFailed)
            owner.signal(signal.SIGCONT)
            await asyncio.sleep(0.5)
            assert _is_empty(ours)
            reader.close()


async def test_a_frozen_owner_does_not_disturb_reads_from_another(
    ours: SharedPool, only_messages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")
    async with _owner() as frozen, _owner() as owner:
        with open_transports(("nixl",)) as [transport]:
            readers = [await transport.open(each.endpoint, BLOCKS, BLOCK_BYTES) for each in (frozen, owner)]
            frozen.signal(signal.SIGSTOP)
            stuck = asyncio.create_task(readers[0].pull(_transfer(ours, 1)))
            await readers[1].pull(_transfer(ours))
            assert not stuck.done()
            assert bytes(ours.block(0)) == b"\x01" * BLOCK_BYTES
            with pytest.raises(TransferFailed):
                await stuck
            for reader in readers:
                reader.close()


async def test_a_pool_is_read_again_after_a_read_that_was_given_up(
    ours: SharedPool, only_messages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")
    async with _owner() as owner:
        with open_transports(("nixl",)) as [transport]:
            reader = await transport.open(owner.endpoint, BLOCKS, BLOCK_BYTES)
            with pytest.raises(TransferFailed):
                await reader.pull(_transfer(ours, 0.002))
            await reader.pull(_transfer(ours))
            assert bytes(ours.block(0).obj) == b"\x01" * (BLOCKS * BLOCK_BYTES)
            reader.close()


def _listening_addresses() -> set[str]:
    """Where this process listens, as /proc/net/tcp writes it."""
    sockets = set()
    for descriptor in os.listdir("/proc/self/fd"):
        if os.path.islink(path := f"/proc/self/fd/{descriptor}"):
            sockets.add(os.readlink(path))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


async def test_nixl_listens_on_the_loopback_interface_only(ours: SharedPool) -> None:
    async with offer_pool(ours, ("nixl",), EXPOSURE):
        with open_transports(("nixl",)):
            assert _listening_addresses() == {"0100007F"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agent_name", ""),
        ("agent_name", "another"),
        ("agent_metadata", b""),
        ("agent_metadata", b"not an agent's"),
        ("agent_metadata", bytes(100_000)),
        ("address", 0),
        ("address", 4096),
        ("address", 2**64 - BLOCK_BYTES),
        ("size", BLOCK_BYTES),
    ],
)
async def test_an_endpoint_that_cannot_be_right_is_unavailable(ours: SharedPool, field: str, value: object) -> None:
    async with offer_pool(ours, ("nixl",), EXPOSURE) as [endpoint]:
        setattr(endpoint.nixl, field, value)
        with open_transports(("nixl",)) as [transport], pytest.raises(TransportUnavailable):
            await transport.open(endpoint, BLOCKS, BLOCK_BYTES)


async def test_blocks_that_are_larger_than_the_staging_area_arrive() -> None:
    size = 5 * 1024 * 1024 + 16
    with SharedPool(3, size) as theirs, SharedPool(3, size) as ours:
        theirs.block(2)[-1:] = b"\x07"
        async with offer_pool(theirs, ("nixl",), EXPOSURE) as [endpoint]:
            with open_transports(("nixl",)) as [transport]:
                reader = await transport.open(endpoint, 3, size)
                await reader.pull(Transfer([0, 2], ours, [2, 1], time.monotonic() + 20))
                assert ours.block(1) == theirs.block(2)
                reader.close()


async def test_a_pool_that_is_not_in_host_memory_is_not_offered() -> None:
    async with offer_pool(Scratch(2, 1024), ("nixl", "tcp"), EXPOSURE) as endpoints:
        assert [endpoint.WhichOneof("endpoint") for endpoint in endpoints] == ["tcp"]


async def test_a_worker_without_nixl_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, f"{name}._bindings", None)
    nixl_agent.load_bindings.cache_clear()
    with pytest.raises(ConfigError, match=r"^transports: nixl is not installed: pip install 'baton-serving\[nixl\]'$"):
        async with host_worker(WorkerConfig(transports=("nixl",), registry={"kind": "memory"})):
            pass


async def test_a_device_that_is_not_there_is_named() -> None:
    config = WorkerConfig(transports=("nixl",), registry={"kind": "memory"}, nixl=NixlConfig(devices=("nosuch0",)))
    with pytest.raises(ConfigError, match=r"nixl\.devices: UCX cannot use nosuch0"):
        async with host_worker(config):
            pass


def test_nixl_beside_tls_has_to_be_allowed() -> None:
    tls = TlsSection(listen=TlsConfig(cert=Path("me.pem"), key=Path("me-key.pem")))
    with pytest.raises(ValueError, match="nixl has no TLS"):
        WorkerConfig(transports=("nixl", "tcp"), tls=tls)
    WorkerConfig(transports=("nixl", "tcp"), tls=tls, nixl=NixlConfig(unencrypted=True))


async def test_a_worker_that_cannot_read_by_nixl_falls_back_to_what_both_have(start: Starter) -> None:
    async with start("prefill", transports=("nixl", "tcp")) as prefill, start("decode", transports=("tcp",)) as decode:
        assert (await decode.calls.decode(decode_request(await prefill.calls.prefill()))).transport == "tcp"


async def test_a_worker_that_ucx_has_no_way_from_falls_back_too(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start("prefill", transports=("nixl", "tcp")) as prefill:
        monkeypatch.setenv("UCX_TLS", "tcp")
        async with start("decode", transports=("nixl", "tcp")) as decode:
            assert (await decode.calls.decode(decode_request(await prefill.calls.prefill()))).transport == "tcp"
