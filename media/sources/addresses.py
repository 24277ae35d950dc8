"""The addresses of hosts, and which of them are public, by IANA's special-purpose registries.

Sources: https://www.iana.org/assignments/iana-ipv4-special-registry and .../iana-ipv6-special-registry.

The hosts that a configuration allows, and the target of an `https:` URI.
"""

import asyncio
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Protocol
from urllib.parse import SplitResult

from baton.errors import InvalidRequest

Address = IPv4Address | IPv6Address

_IPV4_SPECIAL = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT, and the metadata service of one cloud
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # public by number only: a cloud's service for its virtual machines
        "169.254.0.0/16",  # link-local, and most clouds' metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)

# Only 2000::/3 is allocated as global unicast. Everything outside it is refused: loopback,
# IPv4-mapped and IPv4-compatible, NAT64's local prefix, unique local, link-local, site-local, multicast.
_IPV6_GLOBAL = IPv6Network("2000::/3")
_IPV6_SPECIAL = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments; Teredo, which carries an IPv4 address
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which carries an IPv4 address
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)
_IPV4_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """True if `address` is on the public internet. An IPv6 address that stands for an IPv4 one counts as that one."""
    match address:
        case IPv4Address():
            return not any(address in network for network in _IPV4_SPECIAL)
        case IPv6Address() if address in _IPV4_MAPPED or address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
        case IPv6Address():
            return address in _IPV6_GLOBAL and not any(address in network for network in _IPV6_SPECIAL)


class Resolver(Protocol):
    """Resolves a host name. Connections go to these addresses, so that the name is resolved only once."""

    async def resolve(self, host: str) -> tuple[Address, ...]:
        """All addresses of `host`, which may itself be an address; the preferred one first. Empty if it is unknown."""


class SystemResolver:
    """Uses the operating system's resolver."""

    async def resolve(self, host: str) -> tuple[Address, ...]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return ()
        # An address may be listed once for each protocol.
        return tuple(dict.fromkeys(ip_address(address[0]) for *_, address in found))


HTTPS_PORT = 443


@dataclass(frozen=True, slots=True)
class HttpsTarget:
    """The target of a request: a host (a name, or an address without brackets), a port, and the path with its query."""

    host: str
    port: int
    path: str

    @classmethod
    def of(cls, parts: SplitResult, field: str) -> "HttpsTarget":
        """The target of an `https:` URI. Raises InvalidRequest."""
        if "@" in parts.netloc:
            raise InvalidRequest.of(field, "has a user name or password, which are not sent")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            raise InvalidRequest.of(field, "has no valid port") from None
        if not host or host.startswith("."):
            raise InvalidRequest.of(field, "has no host")
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        return cls(host.removesuffix("."), HTTPS_PORT if port is None else port, path)

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == HTTPS_PORT else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HostPattern:
    """An entry of `allowed_hosts`: a name, `*.` and a name for everything below it, or `*`; and one port."""

    name: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "HostPattern":
        """Reads an entry that MediaConfig has accepted."""
        host, port = text, ""
        if ":" in text.rpartition("]")[2]:
            host, _, port = text.rpartition(":")
        return cls(host.strip("[]").removesuffix("."), int(port or HTTPS_PORT))

    def matches(self, target: HttpsTarget) -> bool:
        """True if the pattern allows the target's host and port."""
        if target.port != self.port:
            return False
        if self.name == "*":
            return True
        if self.name.startswith("*."):
            return target.host.endswith(self.name[1:])
        return target.host == self.name
