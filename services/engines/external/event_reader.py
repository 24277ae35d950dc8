"""Reads KV events of another package from ZeroMQ sockets, in the format that vLLM and SGLang share.

Lost ones are asked for again; if the package has them no more, all is forgotten.
"""

import asyncio
import importlib
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from typing_extensions import Self

from runtime.aio import timeout
from runtime.lasting import lasting
from services.engines.external.cached_chains import BlockEvent, CachedChains
from services.engines.external.surroundings import free_ports
from services.engines.kv_events import KvChange, KvPublisher

log = structlog.get_logger(__name__)

_HOST = "127.0.0.1"
_REPLAY_SECONDS = 5.0
_END = (-1).to_bytes(8, "big", signed=True)
# Events between two turns of the loop.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """The sockets at which a rank publishes its KV events and sends old ones again."""

    events: str
    replay: str


@dataclass(frozen=True, slots=True)
class EventFormat:
    """The events of a package, by its name: `read` converts one, and returns None for one that is left out.

    It raises any error of a wrong type, length or value for an event that cannot be read. `count_gap` counts losses.
    """

    package: str
    read: Callable[[Any], BlockEvent | None]
    count_gap: Callable[[], None]


@contextmanager
def event_sockets(ranks: int) -> Iterator[EventEndpoints]:
    """Yields endpoints for an engine of this host: files for one rank, neighbouring ports for several."""
    if ranks > 1:
        first = free_ports(_HOST, 2 * ranks)
        yield EventEndpoints(f"tcp://{_HOST}:{first}", f"tcp://{_HOST}:{first + ranks}")
        return
    with tempfile.TemporaryDirectory(prefix="baton-events-") as folder:
        yield EventEndpoints(f"ipc://{Path(folder) / 'events'}", f"ipc://{Path(folder) / 'replay'}")


class EventReader:
    """Follows all ranks of one engine while its context is open. Without endpoints it reads nothing."""

    def __init__(self, endpoints: EventEndpoints | None, ranks: int, layout: EventFormat) -> None:
        self._endpoints = endpoints
        self._layout = layout
        self._publisher = KvPublisher(ranks)
        self._chains = [CachedChains(rank, self._publisher) for rank in range(ranks)]
        self._reading: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self._endpoints is None:
            return self
        for rank, chains in enumerate(self._chains):
            following = _Rank(_offset(self._endpoints, rank), chains, self._layout)
            name = f"{self._layout.package}_kv_events"
            self._reading.append(asyncio.create_task(lasting(name, following.follow)))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._reading:
            task.cancel()
        if self._reading:
            await asyncio.wait(self._reading)

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        return self._publisher.changes()


class _Rank:
    """The socket of one rank, and the number of the event that is expected next."""

    def __init__(self, endpoints: EventEndpoints, chains: CachedChains, layout: EventFormat) -> None:
        self._endpoints = endpoints
        self._chains = chains
        self._layout = layout
        self._expected = 0
        self._zmq: Any = importlib.import_module("zmq")
        self._new_context = importlib.import_module("zmq.asyncio").Context
        self._decode = importlib.import_module("msgspec.msgpack").decode

    async def follow(self) -> None:
        """Reads until cancelled. After an error it may be called again, and reads all events anew."""
        self._context = self._new_context()
        self._chains.forget()
        self._expected = 0
        socket = self._context.socket(self._zmq.SUB)
        try:
            socket.setsockopt(self._zmq.SUBSCRIBE, b"")
            socket.set_hwm(0)
            # The package listens at a file itself, and connects to a port.
            is_file = self._endpoints.events.startswith("ipc")
            (socket.connect if is_file else socket.bind)(self._endpoints.events)
            # Those from before the subscription.
            await self._ask_again()
            while True:
                for _ in range(_AT_ONCE):
                    frames = await socket.recv_multipart()
                    await self._received(_number(frames), frames[-1])
                await asyncio.sleep(0)
        finally:
            socket.close(linger=0)
            self._context.destroy(linger=0)

    async def _received(self, number: int, payload: bytes) -> None:
        if number > self._expected:
            await self._ask_again()
        if number > self._expected:
            self._forget()
            self._expected = number
        self._receive(number, payload)

    def _forget(self) -> None:
        self._layout.count_gap()
        self._chains.forget()

    def _receive(self, number: int, payload: bytes) -> None:
        # Less: it was asked for again, and came twice.
        if number != self._expected:
            return
        self._expected += 1
        try:
            for each in self._decode(payload)[1]:
                if (event := self._layout.read(each)) is not None:
                    self._chains.feed(event)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            package, text = self._layout.package, f"{type(error).__name__}: {error}"
            log.warning("KV events cannot be read", package=package, number=number, error=text)
            self._forget()

    async def _ask_again(self) -> None:
        """Takes all events that the package still has, from the expected one."""
        socket = self._context.socket(self._zmq.DEALER)
        try:
            async with timeout(_REPLAY_SECONDS):
                socket.connect(self._endpoints.replay)
                await socket.send_multipart([b"", self._expected.to_bytes(8, "big")])
                while True:
                    frames: Sequence[bytes] = await socket.recv_multipart()
                    if frames[-2] == _END:
                        return
                    self._receive(_number(frames), frames[-1])
        except TimeoutError:
            log.warning("no KV events are sent again", package=self._layout.package, endpoint=self._endpoints.replay)
        finally:
            socket.close(linger=0)


def _number(frames: Sequence[bytes]) -> int:
    """The sequence number precedes the payload; versions differ in what precedes both."""
    return int.from_bytes(frames[-2], "big")


def _offset(endpoints: EventEndpoints, rank: int) -> EventEndpoints:
    """Both packages add the rank to the port."""
    if rank == 0:
        return endpoints
    return EventEndpoints(
        *(f"{host}:{int(port) + rank}" for host, port in map(_split, (endpoints.events, endpoints.replay)))
    )


def _split(endpoint: str) -> tuple[str, str]:
    host, _, port = endpoint.rpartition(":")
    return host, port
