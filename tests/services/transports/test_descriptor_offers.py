"""Descriptors that processes of one user hand to one another: refusals, owners that are gone or hang, and no leaks."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest
from support.readable import is_readable

from services.transports.base import TransportUnavailable
from services.transports.descriptors import DescriptorOffer, fetch_descriptor

_NOBODY = 65534
_MANY = 400

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("memory")
    os.pwrite(descriptor, b"content", 0)
    yield descriptor
    os.close(descriptor)


@asynccontextmanager
async def offering(descriptor: int) -> AsyncIterator[DescriptorOffer]:
    offer = DescriptorOffer(descriptor)
    try:
        yield offer
    finally:
        await offer.close()


async def fetch(name: str, secret: bytes) -> int:
    return await asyncio.to_thread(fetch_descriptor, name, secret)


def as_nobody(program: str, *arguments: str) -> "subprocess.Popen[str]":
    """A program of another user, which gets no files of this one: it imports nothing of ours."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, user=_NOBODY, stdout=subprocess.PIPE, text=True, cwd="/")


def held_socket(name: str) -> socket.socket:
    """Listens in the place of an owner, and answers nobody."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(b"\0" + name.encode())
    listening.listen()
    return listening


async def test_each_reader_gets_a_descriptor_of_its_own(memory: int) -> None:
    async with offering(memory) as offer:
        found = [await fetch(offer.name, offer.secret) for _ in range(3)]
    assert len({*found, memory}) == 4
    for each in found:
        assert os.pread(each, 7, 0) == b"content"
        assert not os.get_inheritable(each)
        os.close(each)


async def test_a_reader_with_another_offers_secret_is_refused_and_the_next_one_is_served(memory: int) -> None:
    async with offering(memory) as offer, offering(memory) as other:
        for secret in (other.secret, b"short", b"x" * 4096):
            with pytest.raises(TransportUnavailable, match="refuses its memory's descriptor"):
                await fetch(offer.name, secret)
        os.close(await fetch(offer.name, offer.secret))


@needs_root
async def test_a_reader_of_another_user_is_refused_though_it_has_the_secret(memory: int) -> None:
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        "s.connect('\\0' + sys.argv[1])\n"
        "try: s.send(bytes.fromhex(sys.argv[2])); print(socket.recv_fds(s, 1, 1)[:2])\n"
        "except OSError: print((b'', []))"
    )
    async with offering(memory) as offer:
        reader = as_nobody(program, offer.name, offer.secret.hex())
        said, _ = await asyncio.to_thread(reader.communicate)
        assert said.strip() == "(b'', [])"
        os.close(await fetch(offer.name, offer.secret))


@needs_root
async def test_an_owner_of_another_user_is_not_told_the_secret() -> None:
    program = (
        "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind('\\0baton-of-nobody'); "
        "s.listen(); print('listens', flush=True); print(s.accept()[0].recv(64))"
    )
    owner = as_nobody(program)
    assert owner.stdout is not None
    await asyncio.to_thread(owner.stdout.readline)
    with pytest.raises(TransportUnavailable, match="by another user"):
        await fetch("baton-of-nobody", b"secret")
    said, _ = await asyncio.to_thread(owner.communicate)
    assert said.strip() == "b''"


async def test_an_owner_that_has_ended_is_named_at_once(memory: int) -> None:
    async with offering(memory) as offer:
        pass
    began = time.monotonic()
    with pytest.raises(TransportUnavailable, match="Connection refused"):
        await fetch(offer.name, offer.secret)
    assert time.monotonic() - began < 1


async def test_an_owner_that_hangs_is_given_up_in_time() -> None:
    with held_socket("baton-hangs"):
        began = time.monotonic()
        with pytest.raises(TransportUnavailable, match="timed out"):
            await fetch("baton-hangs", b"secret")
    assert 1 < time.monotonic() - began < 5


@pytest.mark.parametrize("hanging", [1, 5, 200])
async def test_readers_that_hang_do_not_hold_up_the_next_one(memory: int, hanging: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with offering(memory) as offer:
        with ExitStack() as readers:
            for _ in range(hanging):
                readers.enter_context(connected(offer.name))
            began = time.monotonic()
            os.close(await fetch(offer.name, offer.secret))
            # Of those that are open at both ends: as many as are waited for, for a second each.
            assert time.monotonic() - began < 0.9
            assert len(os.listdir("/proc/self/fd")) <= before + hanging + 70
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_descriptors_that_nobody_reads_do_not_stay_open(memory: int) -> None:
    """A pipe's other end sees its end once every copy of the descriptor is closed, also those on their way."""
    reading, writing = os.pipe()
    before = os.listdir("/proc/self/fd")
    async with offering(writing) as offer:
        os.close(writing)
        for _ in range(100):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as leaving:
                leaving.connect(b"\0" + offer.name.encode())
                leaving.sendall(offer.secret)
        os.close(await fetch(offer.name, offer.secret))
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


async def test_an_answer_with_more_descriptors_leaves_none_of_them_open(memory: int) -> None:
    with held_socket("baton-generous") as listening:
        fetching = asyncio.create_task(fetch("baton-generous", b"secret"))
        owner, _ = await asyncio.to_thread(listening.accept)
        before = len(os.listdir("/proc/self/fd"))
        with owner:
            socket.send_fds(owner, [b"x"], [memory] * 5)
            os.close(await fetching)
    assert len(os.listdir("/proc/self/fd")) <= before


_FLOOD = """
import socket, sys, time
address, end = "\\0" + sys.argv[1], time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.setblocking(False)
        try:
            s.connect(address)
        except OSError:
            pass
"""


@needs_root
async def test_a_flood_of_another_users_connections_refuses_no_reader(memory: int) -> None:
    async with offering(memory) as offer:
        floods = [as_nobody(_FLOOD, offer.name, "3") for _ in range(2)]
        await asyncio.sleep(0.5)
        for _ in range(10):
            os.close(await fetch(offer.name, offer.secret))
        assert [flood.wait(20) for flood in floods] == [0, 0]
        for flood in floods:
            flood.communicate()


def connected(name: str, secret: bytes = b"") -> socket.socket:
    """A reader that hangs unless it has a secret to send."""
    reader = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader.setblocking(False)
    reader.connect(b"\0" + name.encode())
    if secret:
        reader.send(secret)
    return reader


async def test_many_readers_that_come_at_once_are_all_served_and_hold_the_event_loop_up_for_none(
    memory: int,
) -> None:
    async with offering(memory) as offer:
        # Before the owner has accepted one.
        readers = [connected(offer.name, offer.secret) for _ in range(_MANY)]
        turns = 0
        for reader in readers:
            while not is_readable(reader):
                await asyncio.sleep(0)
                turns += 1
            with reader:
                _, [found], _, _ = socket.recv_fds(reader, 1, 1)
            os.close(found)
        assert turns >= _MANY
