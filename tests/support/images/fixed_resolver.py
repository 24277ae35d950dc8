"""A resolver that knows a few names and nothing else."""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from media.sources.addresses import Address


class FixedResolver:
    """A Resolver over a table from names to addresses. `asked` is every name it was asked for, in order."""

    def __init__(self, addresses: Mapping[str, Sequence[str]]) -> None:
        self._addresses = {host: tuple(map(ip_address, found)) for host, found in addresses.items()}
        self.asked: list[str] = []

    async def resolve(self, host: str) -> tuple[Address, ...]:
        """Resolves as `Resolver` does."""
        self.asked.append(host)
        return self._addresses.get(host, ())
