"""The other routers of a fleet, as admission control sees them: who is the home of what, and what it lends."""

import asyncio
from typing import Protocol

from baton.engine.v1 import peer_pb2
from baton.errors import Unavailable
from router.admission.ledger import THIS_ROUTER


class Peers(Protocol):
    """The routers that are registered, this one included."""

    @property
    def count(self) -> int:
        """The number of routers; 1 without others."""

    @property
    def routers(self) -> frozenset[str]:
        """Their names; this one's is THIS_ROUTER too."""

    @property
    def knows_others(self) -> bool:
        """True once the registry has shown this router its own record, and with it all that came before."""

    def home(self, key: str) -> str:
        """The router that is the home of a key; THIS_ROUTER for this one."""

    def home_since(self, key: str) -> float:
        """The time since which this router has been the home of a key, on its monotonic clock."""

    def lenders(self, key: str) -> tuple[str, ...]:
        """The routers that may lend a tenant's quota, the likeliest first; THIS_ROUTER for this one."""

    def lends_since(self, key: str) -> float | None:
        """The time since which only this router lends a tenant's quota; None if it does not lend."""

    def next_change(self) -> asyncio.Event:
        """An event that is set when another router may begin to lend, as far as this one knows."""

    async def lend(self, home: str, ask: peer_pb2.QuotaAsk) -> peer_pb2.QuotaLoan:
        """Asks another router for a part of a quota. Raises a BatonError if it does not answer soon."""

    async def lend_places(self, home: str, ask: peer_pb2.PlacesAsk) -> peer_pb2.PlacesLoan:
        """Asks another router for places. Raises a BatonError if it does not answer soon."""


class NoPeers:
    """Of a router that is the only one."""

    count = 1
    routers = frozenset({THIS_ROUTER})
    knows_others = True

    def home(self, key: str) -> str:
        """This router."""
        del key
        return THIS_ROUTER

    def home_since(self, key: str) -> float:
        """Always."""
        del key
        return float("-inf")

    def lenders(self, key: str) -> tuple[str, ...]:
        """This router."""
        del key
        return (THIS_ROUTER,)

    def lends_since(self, key: str) -> float | None:
        """Always."""
        del key
        return float("-inf")

    def next_change(self) -> asyncio.Event:
        """Never set."""
        return asyncio.Event()

    async def lend(self, home: str, ask: peer_pb2.QuotaAsk) -> peer_pb2.QuotaLoan:
        """Raises Unavailable."""
        raise Unavailable(f"{home}: there is no other router to ask for {ask.tenant!r:.100}")

    async def lend_places(self, home: str, ask: peer_pb2.PlacesAsk) -> peer_pb2.PlacesLoan:
        """Raises Unavailable."""
        raise Unavailable(f"{home}: there is no other router to ask for {ask.model!r:.100}")


ALONE = NoPeers()
