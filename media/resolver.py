"""How the names of hosts become addresses."""

import asyncio
import socket
from ipaddress import ip_address
from typing import Protocol

from media.addresses import Address


class Resolver(Protocol):
    """Finds the addresses of a host. Nobody else is asked: connections go to these addresses and not to the name."""

    async def resolve(self, host: str) -> tuple[Address, ...]:
        """All addresses of `host`, which may be an address itself, the preferred first; none if it is not known."""


class SystemResolver:
    """Asks the operating system: hosts file, DNS, and whatever else it has been told to use."""

    async def resolve(self, host: str) -> tuple[Address, ...]:
        """See `Resolver.resolve`."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return ()
        # The same address may come once for each protocol.
        return tuple(dict.fromkeys(ip_address(address[0]) for *_, address in found))
