"""The transports by name: those of Baton, and those that other distributions bring."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from baton.errors import ConfigError
from rpc.auth.tls import TlsConfig
from services.engines.kv import BlockMemory
from services.transports.base import Endpoint, Exposure, Transport, TransportContext, TransportOptions
from services.transports.cuda_ipc import CudaIpcTransport
from services.transports.nixl import NixlTransport
from services.transports.shm import ShmTransport
from services.transports.tcp import TcpTransport

TRANSPORTS: dict[str, type[Transport]] = {
    CudaIpcTransport.name: CudaIpcTransport,
    ShmTransport.name: ShmTransport,
    NixlTransport.name: NixlTransport,
    TcpTransport.name: TcpTransport,
}
ENTRY_POINTS = "baton.transports"


def transport_class(name: str) -> type[Transport]:
    """Returns the class of a transport: one of TRANSPORTS, an entry point, or `module:Class`.

    Raises ConfigError naming the transports that exist.
    """
    if name in TRANSPORTS:
        return TRANSPORTS[name]
    found = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
    module, colon, attribute = found.get(name, name).partition(":")
    if not colon:
        known = ", ".join(sorted({*TRANSPORTS, *found}))
        raise ConfigError(f"unknown transport {name!r}; expected one of {known}, or module:Class")
    try:
        loaded: type[Transport] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"transport {name!r} cannot be loaded: {error}") from error
    return loaded


def read_options(transport: type[Transport], options: Mapping[str, Mapping[str, Any]]) -> TransportOptions:
    """Returns the options of a transport, from the section of its name. Raises ConfigError naming the wrong key."""
    try:
        return transport.options.model_validate(options.get(transport.name, {}))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(["transport_options", transport.name, *map(str, first["loc"])])
        raise ConfigError(f"{path}: {first['msg']}") from error


@asynccontextmanager
async def open_transports(
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    tls: TlsConfig | None = None,
    memory: BlockMemory | None = None,
) -> AsyncIterator[list[Transport]]:
    """Yields the transports, in this order. Transports that support TLS connect to owners with `tls`.
    `memory` is the pool that blocks are read into, for transports that depend on it.

    Raises ConfigError for an unknown transport, for wrong options, and for a transport that cannot be used here.
    """
    async with AsyncExitStack() as stack:
        transports = []
        for kind in map(transport_class, names):
            context = TransportContext(read_options(kind, options or {}), tls, memory)
            transports.append(await stack.enter_async_context(kind(context)))
        yield transports


async def offer_pool(transports: Sequence[Transport], memory: BlockMemory, exposure: Exposure) -> list[Endpoint]:
    """Returns the endpoints of a pool, one for each transport that can offer it, in their order."""
    offered = [await transport.offer(memory, exposure) for transport in transports]
    return [endpoint for endpoint in offered if endpoint is not None]
