"""Routers of one fleet in virtual time: the classes of the product, whose calls to each other are made directly."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from support.clock import ManualClock
from support.router.measured_workers import StaticFleet, measured

from baton.engine.v1 import peer_pb2
from baton.errors import Unavailable
from discovery.record import Location, WorkerRecord
from router.admission.controller import AdmissionController
from router.admission.quotas import Quotas
from router.config import AdmissionConfig, Fairness, QuotasConfig
from router.peers.link import check_promise, check_response
from router.peers.membership import QUOTAS, RegisteredPeers
from router.peers.service import PeerServicer, check
from router.recording.recorder import find_here

_NO_RECORDS = partial(find_here, recorder=None)


def record(name: str) -> WorkerRecord:
    return WorkerRecord(
        name, 0, "127.0.0.1:1", ("router",), "", "", "", 0, capabilities=(QUOTAS,), location=Location(host="here")
    )


class DirectLink:
    """Calls to another router of the same process, as messages that are checked as those of a network are."""

    def __init__(self, fleet: "Fleet", own_id: str, other: WorkerRecord) -> None:
        self._fleet = fleet
        self._own_id = own_id
        self.record = other

    def close(self) -> None:
        pass

    async def ask_quota(self, ask: peer_pb2.QuotaAsk) -> peer_pb2.QuotaLoan:
        self._fleet.asked[self.record.worker_id] += 1
        return self._call(peer_pb2.LendRequest(router_id=self._own_id, quotas=[ask])).quotas[0]

    async def ask_places(self, ask: peer_pb2.PlacesAsk) -> peer_pb2.PlacesLoan:
        return self._call(peer_pb2.LendRequest(router_id=self._own_id, places=[ask])).places[0]

    def promise(self) -> peer_pb2.PromiseResponse:
        own = self._fleet.routers[self._own_id].peers.quorum
        response = self._other().peers.quorum.answer(self._own_id, cannot_lend=not own.may_lend)
        check_promise(response)
        return response

    def _other(self) -> "SimulatedRouter":
        other = self._fleet.routers.get(self.record.worker_id)
        if other is None or other.is_paused or (self._own_id, other.name) in self._fleet.cut:
            raise Unavailable(f"{self.record.worker_id} is gone")
        return other

    def _call(self, request: peer_pb2.LendRequest) -> peer_pb2.LendResponse:
        other = self._other()
        check(request)
        response = other.servicer.lend(request)
        check_response(response, len(request.quotas), len(request.places))
        return response


@dataclass(eq=False)
class SimulatedRouter:
    """One router of the fleet."""

    name: str
    peers: RegisteredPeers
    quotas: Quotas
    admission: AdmissionController
    servicer: PeerServicer
    is_paused: bool = False  # nothing runs there, and no view of the registry arrives


@dataclass(eq=False)
class Fleet:
    """Routers that see each other's registrations when `see` is called. `cut` are pairs whose calls fail."""

    quotas: QuotasConfig = field(default_factory=QuotasConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    fairness: Fairness = "none"
    wait_seconds: float = 0.0  # by real time, for a lender and its bucket
    clock: ManualClock = field(default_factory=ManualClock)
    routers: dict[str, SimulatedRouter] = field(default_factory=dict)
    registered: list[str] = field(default_factory=list)
    cut: set[tuple[str, str]] = field(default_factory=set)
    late: set[str] = field(default_factory=set)  # routers that get no views of the registry
    asked: Counter[str] = field(default_factory=Counter)  # how often each was asked for quotas

    def start(self, name: str) -> SimulatedRouter:
        """A router that has joined, and that the others see from now on."""
        peers = RegisteredPeers(record(name), lambda other: DirectLink(self, name, other), self.clock)  # type: ignore[arg-type, return-value]
        workers = StaticFleet()
        workers.set(measured(self.clock, "prefill", "decode", model="m"))
        quotas = Quotas(self.quotas, self.clock, peers, wait_seconds=self.wait_seconds)
        admission = AdmissionController(
            workers, self.admission, quotas, self.clock, fairness=self.fairness, peers=peers
        )
        router = SimulatedRouter(name, peers, quotas, admission, PeerServicer(peers, admission, _NO_RECORDS))
        self.routers[name] = router
        self.registered.append(name)
        peers.quorum.is_registered = lambda: name in self.registered
        self.see()
        self._poll(router)
        return router

    def _poll(self, router: SimulatedRouter) -> None:
        """Asks for the promises of all others, again and again."""
        if self.routers.get(router.name) is not router:
            return
        self.clock.call_later(router.peers.quorum.poll_seconds, partial(self._poll, router))
        if router.is_paused:
            return
        router.peers.quorum.note_awake()
        for link in router.peers.links:
            with suppress(Unavailable):
                router.peers.quorum.take(link.record.worker_id, link.promise(), self.clock())  # type: ignore[attr-defined]

    def pause(self, name: str) -> None:
        """Stops a router."""
        self.routers[name].is_paused = True

    def resume(self, name: str) -> None:
        """Lets it go on, before it has seen anything that has happened meanwhile."""
        self.routers[name].is_paused = False

    def kill(self, name: str) -> None:
        """Ends a router at once. The others see it when its registration is taken back."""
        del self.routers[name]

    def expire(self, name: str) -> None:
        """Takes the registration of a router back."""
        self.registered.remove(name)
        self.see()

    def see(self) -> None:
        for router in self.routers.values():
            if not router.is_paused and router.name not in self.late:
                router.peers.update([replace(record(name)) for name in self.registered])

    async def settle(self) -> None:
        for router in list(self.routers.values()):
            if not router.is_paused:
                await router.quotas.settle()
