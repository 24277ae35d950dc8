"""Which transports there are, by name: to offer a pool by, and to read others' pools by."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from baton.engine.v1 import handoff_pb2

from rpc.tls import TlsConfig
from services.kv import BlockMemory
from services.transports import shm
from services.transports.nixl import NixlTransport
from services.transports.nixl_owner import LOOPBACK, register_pool
from services.transports.secure import OwnerTls, ReaderTls
from services.transports.shm import ShmTransport
from services.transports.tcp import TcpTransport
from services.transports.tcp_server import serve_pool
from services.transports.transport import Transport


@dataclass(frozen=True, slots=True)
class Exposure:
    """Where pools are offered. With `tls` they are encrypted, and where it is mutual only workers are served.

    NIXL knows no such thing: what it offers is guarded by nothing but the network that `nixl_devices` are in.
    """

    listen_host: str
    advertised_host: str
    tls: TlsConfig | None = None
    nixl_devices: Sequence[str] = LOOPBACK


@asynccontextmanager
async def offer_pool(
    memory: BlockMemory, names: Sequence[str], exposure: Exposure
) -> AsyncIterator[list[handoff_pb2.TransportEndpoint]]:
    """The endpoints at which `memory` can be read while the context is open, in the order of `names`.

    Raises ConfigError for a transport that cannot be had here; one that cannot offer this memory is left out.
    """
    owner_tls = None if exposure.tls is None else OwnerTls(exposure.tls)
    endpoints: list[handoff_pb2.TransportEndpoint | None] = []
    async with AsyncExitStack() as stack:
        for name in names:
            match name:
                case "shm":
                    endpoints.append(shm.endpoint(memory))
                case "nixl":
                    registering = register_pool(memory, exposure.nixl_devices)
                    endpoints.append(await stack.enter_async_context(registering))
                case "tcp":
                    server = await stack.enter_async_context(serve_pool(memory, exposure.listen_host, owner_tls))
                    endpoints.append(server.endpoint(exposure.advertised_host))
        yield [endpoint for endpoint in endpoints if endpoint is not None]


@contextmanager
def open_transports(
    names: Sequence[str], tls: TlsConfig | None = None, nixl_devices: Sequence[str] = LOOPBACK
) -> Iterator[list[Transport]]:
    """What reads others' pools; with `tls` what they offer beyond their host must have it too, but for NIXL.

    Raises ConfigError for a transport that cannot be had here.
    """
    reader_tls = None if tls is None else ReaderTls(tls)
    with ExitStack() as stack:
        transports: list[Transport] = []
        for name in names:
            match name:
                case "shm":
                    transports.append(stack.enter_context(ShmTransport()))
                case "nixl":
                    transports.append(stack.enter_context(NixlTransport(nixl_devices)))
                case "tcp":
                    transports.append(stack.enter_context(TcpTransport(reader_tls)))
        yield transports
