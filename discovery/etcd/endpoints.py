"""The members of an etcd cluster, and which of them is talked to."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpc import aio

from rpc.channels import open_channel
from rpc.tls import TlsConfig

# etcd ends a connection that is pinged while no call runs on it.
_REPLACED_OPTIONS = {"grpc.keepalive_permit_without_calls": 0}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One member, and the channel to it."""

    address: str
    channel: aio.Channel


class Endpoints:
    """One channel a member, opened when first needed and kept until `close`.

    All callers talk to the same member until one of them leaves it. A channel that was left stays open: others may
    still be waiting on it, and it connects again by itself.
    """

    def __init__(self, addresses: Sequence[str], tls: TlsConfig | None) -> None:
        self._addresses = tuple(addresses)
        self._tls = tls
        self._opened: dict[str, Endpoint] = {}
        self._position = 0

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def current(self) -> Endpoint:
        """The member to talk to now."""
        address = self._addresses[self._position]
        if address not in self._opened:
            channel = open_channel(address, self._tls, replaced_options=_REPLACED_OPTIONS)
            self._opened[address] = Endpoint(address, channel)
        return self._opened[address]

    def leave(self, endpoint: Endpoint) -> None:
        """Turns to the next member, unless somebody already did."""
        if endpoint.address == self._addresses[self._position]:
            self._position = (self._position + 1) % len(self._addresses)

    async def close(self) -> None:
        """Closes every channel; calls that still run are cancelled."""
        for endpoint in self._opened.values():
            await endpoint.channel.close(None)
