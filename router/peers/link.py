"""Calls to another router: one at a time, each with all that was asked meanwhile."""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import structlog
from grpc import aio

from baton.calls import unary
from baton.engine.v1 import peer_pb2, peer_pb2_grpc
from baton.errors import BatonError, InvalidReply, Unavailable
from baton.inference.v1 import cluster_service_pb2
from discovery.registry import WorkerRecord
from router.peers.quorum import Quorum
from rpc.channels import Dial
from runtime.aio import TaskGroup
from runtime.clock import monotonic

log = structlog.get_logger(__name__)

MOST_ASKS = 1024  # of each kind, in one call
LONGEST_TENANT = 128  # characters of a name
_LONGEST_ROUTER = 200  # as of a key of the registry
MOST_NUMBER = 2.0**50  # above which no number is believed
_RECORDS_SECONDS = 3.0  # to find records: more than a router needs to make those of requests that have just ended
_PAUSE_SECONDS = 0.5  # after a call that failed, in which none is tried

Ask = TypeVar("Ask")
Result = TypeVar("Result")

_QuotaFuture: TypeAlias = "asyncio.Future[peer_pb2.QuotaLoan]"
_PlacesFuture: TypeAlias = "asyncio.Future[peer_pb2.PlacesLoan]"


class PeerLink:
    """The calls to one router. Its channel is opened with the first one."""

    def __init__(self, record: WorkerRecord, own_id: str, group: TaskGroup, dial: Dial, timeout_seconds: float) -> None:
        self.record = record
        self._own_id = own_id
        self._dial = dial
        self._timeout_seconds = timeout_seconds
        self._quotas: dict[_QuotaFuture, peer_pb2.QuotaAsk] = {}
        self._places: dict[_PlacesFuture, peer_pb2.PlacesAsk] = {}
        self._asked = asyncio.Event()
        self._failed_at = -math.inf
        self._channel: aio.Channel | None = None
        self._group = group
        self._task = group.create_task(self._run())
        self._polling: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Ends the calls; what waits fails with Unavailable."""
        self._task.cancel()
        if self._polling is not None:
            self._polling.cancel()

    def poll(self, quorum: Quorum) -> "PeerLink":
        """Asks this router for its promises again and again from now on. Returns the link."""
        self._polling = self._group.create_task(self._poll(quorum))
        return self

    async def _poll(self, quorum: Quorum) -> None:
        name = self.record.worker_id
        while True:
            request = peer_pb2.PromiseRequest(router_id=self._own_id, cannot_lend=not quorum.may_lend)
            asked_at = monotonic()
            try:
                promise = await unary(self._stub().Promise(request, timeout=self._timeout_seconds))
                check_promise(promise)
                quorum.take(name, promise, asked_at)
            except BatonError:
                pass
            await asyncio.sleep(max(0.0, asked_at + quorum.poll_seconds - monotonic()))

    async def ask_quota(self, ask: peer_pb2.QuotaAsk) -> peer_pb2.QuotaLoan:
        """Raises a BatonError if there is no answer in time, or a moment after that happened."""
        waiting: _QuotaFuture = self._loop().create_future()
        self._quotas[waiting] = ask
        self._asked.set()
        return await waiting

    async def ask_places(self, ask: peer_pb2.PlacesAsk) -> peer_pb2.PlacesLoan:
        """Raises as `ask_quota`."""
        waiting: _PlacesFuture = self._loop().create_future()
        self._places[waiting] = ask
        self._asked.set()
        return await waiting

    async def list_tenants(self) -> peer_pb2.ListOwnTenantsResponse:
        """The tenants of that router alone. Raises a BatonError."""
        request = peer_pb2.ListOwnTenantsRequest()
        response = await unary(self._stub().ListOwnTenants(request, timeout=2 * self._timeout_seconds))
        check_tenants(response.tenants)
        return response

    async def find_records(self, request: peer_pb2.FindRecordsRequest) -> peer_pb2.FindRecordsResponse:
        """The records that that router alone has. Raises a BatonError."""
        asked = peer_pb2.FindRecordsRequest(router_id=self._own_id)
        asked.MergeFrom(request)
        return await unary(self._stub().FindRecords(asked, timeout=_RECORDS_SECONDS))

    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._task.done() or loop.time() < self._failed_at + _PAUSE_SECONDS:
            raise Unavailable(f"router {self.record.worker_id} could not be reached just now")
        return loop

    def _stub(self) -> "peer_pb2_grpc.PeerServiceAsyncStub":
        if self._channel is None:
            self._channel = self._dial(self.record.address)
        return peer_pb2_grpc.PeerServiceStub(self._channel)

    async def _run(self) -> None:
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                quotas, places = _batch(self._quotas), _batch(self._places)
                if self._quotas or self._places:
                    self._asked.set()
                await self._call(quotas, places)
        finally:
            gone = Unavailable(f"router {self.record.worker_id} has left")
            _fail((*self._quotas, *self._places), gone)
            if self._channel is not None:
                await self._channel.close(None)

    async def _call(
        self, quotas: Mapping[_QuotaFuture, peer_pb2.QuotaAsk], places: Mapping[_PlacesFuture, peer_pb2.PlacesAsk]
    ) -> None:
        request = peer_pb2.LendRequest(router_id=self._own_id, quotas=quotas.values(), places=places.values())
        try:
            response = await unary(self._stub().Lend(request, timeout=self._timeout_seconds))
            check_response(response, len(quotas), len(places))
        except BatonError as error:
            self._failed_at = asyncio.get_running_loop().time()
            log.warning("router of the fleet does not answer", router=self.record.worker_id, error=error.message)
            _fail((*quotas, *places, *self._quotas, *self._places), error)
            self._quotas.clear()
            self._places.clear()
            return
        except BaseException:
            _fail((*quotas, *places), Unavailable(f"router {self.record.worker_id} has left"))
            raise
        for waiting, loan in zip(quotas, response.quotas, strict=True):
            if not waiting.done():
                waiting.set_result(loan)
        for held, lent in zip(places, response.places, strict=True):
            if not held.done():
                held.set_result(lent)


def check_response(response: peer_pb2.LendResponse, quotas: int, places: int) -> None:
    """Raises InvalidReply for an answer that no router may give."""
    if len(response.quotas) != quotas or len(response.places) != places:
        raise InvalidReply("a router answered another number of asks")
    numbers = [number for loan in response.quotas for number in (loan.more_requests, loan.more_tokens)]
    if not all(0 <= number <= MOST_NUMBER for number in numbers):
        raise InvalidReply("a router lent what is no number of requests or tokens")
    for loan in response.places:
        if len(loan.counters) > MOST_ASKS:
            raise InvalidReply("a router told more counters than it was asked for")
        if not are_counters(loan.counters.values()):
            raise InvalidReply("a router told counters that are no numbers")


def check_promise(promise: peer_pb2.PromiseResponse) -> None:
    """Raises InvalidReply for a promise that no router may give."""
    if len(promise.routers) + len(promise.joining) > MOST_ASKS:
        raise InvalidReply(f"a router told more than {MOST_ASKS} routers")
    if any(len(name) > _LONGEST_ROUTER for name in (*promise.routers, *promise.joining)):
        raise InvalidReply(f"a router told of one whose name has more than {_LONGEST_ROUTER} characters")
    if not all(0 <= number <= MOST_NUMBER for number in (promise.seconds, promise.joins_seconds, promise.age_seconds)):
        raise InvalidReply("a router promised for what is no time")


def check_tenants(tenants: Sequence[cluster_service_pb2.TenantUsage]) -> None:
    """Raises InvalidReply for what no router tells of its tenants."""
    for one in tenants:
        if len(one.tenant) > LONGEST_TENANT:
            raise InvalidReply(f"a router told of a tenant whose name has {len(one.tenant)} characters")
        if not are_counters((one.recent_work, one.requests_left, one.tokens_left)):
            raise InvalidReply("a router told of a tenant what is no number of requests or tokens")


def are_counters(numbers: Iterable[float]) -> bool:
    """True if counters, which may also fall, are believable."""
    return all(-MOST_NUMBER <= number <= MOST_NUMBER for number in numbers)


def _batch(waiting: "dict[asyncio.Future[Result], Ask]") -> "dict[asyncio.Future[Result], Ask]":
    """The first of what waits, which it removes."""
    first = dict(islice(waiting.items(), MOST_ASKS))
    for one in first:
        del waiting[one]
    return first


def _fail(waiting: Iterable["asyncio.Future[Any]"], error: BatonError) -> None:
    for one in waiting:
        if not one.done():
            one.set_exception(error)
            one.exception()  # Retrieved: its request may have left.
