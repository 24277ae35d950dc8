"""The endpoints beside workers, as IP:port: what gateways need, whatever workers advertise."""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from router.workers.handle import WorkerHandle
from runtime.aio import timeout
from runtime.clock import monotonic

_LOOKUP_SECONDS = 1.0
_FRESH_SECONDS = 5.0  # before a name is looked up again


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a router, and a worker beside it."""

    address: str
    worker: WorkerHandle


class Endpoints:
    """Finds the endpoints beside workers. Names of hosts are looked up, and remembered for a while."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}

    async def beside(self, workers: Sequence[WorkerHandle], port: int) -> list[Endpoint]:
        """One for each worker, without those whose name is unknown."""
        found = await asyncio.gather(*(self._address(worker.record.host) for worker in workers))
        return [
            Endpoint(f"[{address}]:{port}" if ":" in address else f"{address}:{port}", worker)
            for address, worker in zip(found, workers, strict=True)
            if address
        ]

    async def _address(self, host: str) -> str:
        """Its IP address; empty if it is not found."""
        if _is_ip(host):
            return host
        known, until = self._known.get(host, ("", 0.0))
        if monotonic() < until:
            return known
        try:
            async with timeout(_LOOKUP_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, TimeoutError):
            # Also a name that is not found is not looked up for each request.
            found = []
        address = str(found[0][4][0]) if found else ""
        self._known[host] = address, monotonic() + _FRESH_SECONDS
        return address


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
