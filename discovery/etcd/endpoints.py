"""The members of an etcd cluster, and the one in use."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpc import aio

from rpc.auth.tls import TlsConfig
from rpc.channels import open_channel

# etcd closes connections that are pinged while no call runs on them.
_REPLACED_OPTIONS = {"grpc.keepalive_permit_without_calls": 0}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One member, and the channel to it."""

    address: str
    channel: aio.Channel


class Endpoints:
    """One channel for each member, opened on first use and kept until `close`.

    All callers use the same member until one of them leaves it. The channel to it stays open: others may still wait on
    it, and it reconnects by itself.
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
        """The member in use."""
        address = self._addresses[self._position]
        if address not in self._opened:
            channel = open_channel(address, self._tls, replaced_options=_REPLACED_OPTIONS)
            self._opened[address] = Endpoint(address, channel)
        return self._opened[address]

    def leave(self, endpoint: Endpoint) -> None:
        """Switches to the next member, unless another caller already did."""
        if endpoint.address == self._addresses[self._position]:
            self._position = (self._position + 1) % len(self._addresses)

    async def close(self) -> None:
        """Closes every channel, and cancels running calls."""
        for endpoint in self._opened.values():
            await endpoint.channel.close(None)
