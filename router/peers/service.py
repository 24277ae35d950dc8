"""PeerService: what this router lends others as a home, and how it serves and registers that."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from grpc import aio

from baton.engine.v1 import peer_pb2, peer_pb2_grpc
from baton.errors import InvalidRequest, Unavailable
from discovery.record import Location, WorkerRecord
from discovery.registry import Registry
from router.admission.controller import AdmissionController
from router.admission.ledger import THIS_ROUTER
from router.config import RouterConfig
from router.peers.link import LONGEST_TENANT, MOST_ASKS, MOST_NUMBER, PeerLink, are_counters
from router.peers.membership import QUOTAS, RECORDS_ONLY, RegisteredPeers
from router.peers.quorum import Quorum
from router.peers.tenants import own_tenants
from rpc.auth.access import Access, Rules
from rpc.channels import dialer
from rpc.health import Health
from rpc.server import ServerOptions, Service, serve
from runtime.aio import TaskGroup, timeout
from runtime.entropy import token_hex
from runtime.lasting import lasting

SERVICE_NAME = "baton.engine.v1.PeerService"
RULES: Rules = {f"/{SERVICE_NAME}/": frozenset({"worker"})}  # routers have the role worker

Context = aio.ServicerContext[Any, Any]

FindRecords: TypeAlias = Callable[[peer_pb2.FindRecordsRequest], Awaitable[peer_pb2.FindRecordsResponse]]

_LONGEST_NAME = 256
_VIEW_SECONDS = 3.0  # for the first view of the registry
_NOT_HOME = peer_pb2.QuotaLoan(not_home=True)


class PeerServicer(peer_pb2_grpc.PeerServiceServicer):
    """The service for other routers. One that is not registered gets nothing, as this one may not know of it yet."""

    def __init__(self, peers: RegisteredPeers, admission: AdmissionController, find_records: FindRecords) -> None:
        self._peers = peers
        self._admission = admission
        self._find_records = find_records

    async def Lend(self, request: peer_pb2.LendRequest, _context: Context) -> peer_pb2.LendResponse:
        check(request)
        return self.lend(request)

    async def Promise(self, request: peer_pb2.PromiseRequest, _context: Context) -> peer_pb2.PromiseResponse:
        return self._peers.quorum.answer(request.router_id, cannot_lend=request.cannot_lend)

    async def ListOwnTenants(
        self, _request: peer_pb2.ListOwnTenantsRequest, _context: Context
    ) -> peer_pb2.ListOwnTenantsResponse:
        return peer_pb2.ListOwnTenantsResponse(tenants=own_tenants(self._admission))

    async def FindRecords(
        self, request: peer_pb2.FindRecordsRequest, _context: Context
    ) -> peer_pb2.FindRecordsResponse:
        if not self._peers.has(request.router_id):
            raise Unavailable("the router that asks is not registered, as this one sees it")
        return await self._find_records(request)

    def lend(self, request: peer_pb2.LendRequest) -> peer_pb2.LendResponse:
        """The answers to a request that has been checked."""
        borrower, routers = request.router_id, self._peers.routers
        if borrower not in routers or borrower == THIS_ROUTER:
            return peer_pb2.LendResponse(
                quotas=[_NOT_HOME] * len(request.quotas),
                places=[peer_pb2.PlacesLoan(not_home=True)] * len(request.places),
            )
        places = [self._admission.lend_places(borrower, ask, routers) for ask in request.places]
        return peer_pb2.LendResponse(quotas=[self._quota(borrower, ask) for ask in request.quotas], places=places)

    def _quota(self, borrower: str, ask: peer_pb2.QuotaAsk) -> peer_pb2.QuotaLoan:
        since = self._peers.lends_since(ask.tenant)
        return _NOT_HOME if since is None else self._admission.quotas.ledger.lend(borrower, ask, since)


def check(request: peer_pb2.LendRequest) -> None:
    """Raises InvalidRequest for what no router asks."""
    for field, count in (("quotas", len(request.quotas)), ("places", len(request.places))):
        if count > MOST_ASKS:
            raise InvalidRequest.of(field, f"has {count} of at most {MOST_ASKS}")
    for index, ask in enumerate(request.quotas):
        _check_name(f"quotas[{index}].tenant", ask.tenant, LONGEST_TENANT)
        _check_numbers(
            f"quotas[{index}]",
            (
                *(ask.left_requests, ask.left_tokens, ask.spent_tokens, ask.requests, ask.tokens),
                *(ask.more_requests, ask.more_tokens),
            ),
        )
    for index, wish in enumerate(request.places):
        _check_name(f"places[{index}].model", wish.model, _LONGEST_NAME)
        _check_name(f"places[{index}].role", wish.role, _LONGEST_NAME)
        _check_numbers(f"places[{index}].step", (wish.step,))
        for field, tenants in (("served", wish.served), ("waiting_tenants", wish.waiting_tenants)):
            if len(tenants) > MOST_ASKS:
                raise InvalidRequest.of(f"places[{index}].{field}", f"has {len(tenants)} of at most {MOST_ASKS}")
        if not are_counters(wish.served.values()):
            raise InvalidRequest.of(f"places[{index}]", "has counters that are no numbers")


def _check_name(field: str, name: str, most: int) -> None:
    if len(name) > most:
        raise InvalidRequest.of(field, f"has {len(name)} of at most {most} characters")


def _check_numbers(field: str, numbers: Iterable[float]) -> None:
    if not all(0 <= number <= MOST_NUMBER for number in numbers):
        raise InvalidRequest.of(field, f"has a number that is not in [0, {MOST_NUMBER:g}]")


@asynccontextmanager
async def follow_peers(config: RouterConfig, registry: Registry) -> AsyncIterator[RegisteredPeers]:
    """The other routers, while the context is open. Entering waits a little for the first view."""
    async with TaskGroup() as group:
        own, dial = _own_record(config), dialer(config.tls.call)
        has_quotas = QUOTAS in own.capabilities

        def connect(record: WorkerRecord) -> PeerLink:
            link = PeerLink(record, own.worker_id, group, dial, config.peers.timeout_seconds)
            return link.poll(peers.quorum) if has_quotas and QUOTAS in record.capabilities else link

        peers = RegisteredPeers(own, connect)
        seen = asyncio.Event()
        peers.changed = seen.set
        following = group.create_task(lasting("router_registry", partial(peers.follow, registry.routers)))
        try:
            try:
                async with timeout(_VIEW_SECONDS):
                    await seen.wait()
            except TimeoutError:
                pass
            yield peers
        finally:
            following.cancel()
            peers.close()


@asynccontextmanager
async def serve_peers(
    config: RouterConfig,
    registry: Registry,
    peers: RegisteredPeers,
    admission: AdmissionController,
    find_records: FindRecords,
) -> AsyncIterator[None]:
    """Serves other routers and is registered while the context is open; borrows and gives back by tasks."""
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(TaskGroup())
        works = (
            (("quotas", admission.quotas.follow), ("places", admission.share), ("quorum", peers.quorum.follow))
            if config.shares_limits
            else ()
        )
        for name, work in works:
            stack.callback(group.create_task(lasting(name, work)).cancel)
        peers.changed = admission.routers_changed
        health = Health()
        servicer = PeerServicer(peers, admission, find_records)
        server = await stack.enter_async_context(
            serve(
                config.peers.listen or "127.0.0.1:0",
                [Service(SERVICE_NAME, peer_pb2_grpc.add_PeerServiceServicer_to_server, servicer)],
                health=health,
                drain_seconds=0,
                options=ServerOptions(
                    tls=config.tls.listen,
                    access=Access(RULES) if config.tls.is_mutual else None,
                    connections=config.connections,
                    kind=config.server,
                ),
            )
        )
        health.set("", True)
        record = replace(peers.own, address=config.peers.advertise or f"{_host(config)}:{server.port}")
        registered = partial(_registered, registry, record, peers.quorum)
        registering = group.create_task(lasting("router_registration", registered))
        stack.callback(registering.cancel)
        yield


async def _registered(registry: Registry, record: WorkerRecord, quorum: Quorum) -> None:
    """Keeps the record registered until cancelled. A registry that is away is asked again and again."""
    async with registry.routers.register(record) as registration:
        quorum.is_registered = lambda: registration.registered
        await asyncio.Event().wait()


def _own_record(config: RouterConfig) -> WorkerRecord:
    """This process's record; its id is its own, so that none takes a restarted router for the one before."""
    name = f"{config.router_id[:100] or 'router'}-{token_hex(8)}"
    return WorkerRecord(
        worker_id=name,
        epoch=0,
        address=f"{_host(config)}:0",
        roles=("router",),
        model="",
        engine="",
        layout_digest="",
        max_context_tokens=0,
        capabilities=_capabilities(config),
        location=Location(host=socket.gethostname()[:253]),
    )


def _capabilities(config: RouterConfig) -> tuple[str, ...]:
    if not config.shares_limits:
        return (RECORDS_ONLY,)
    return () if config.quotas.are_none else (QUOTAS,)


def _host(config: RouterConfig) -> str:
    """The name by which others know this host: of a router that listens everywhere, the host's own."""
    host = (config.peers.advertise or config.peers.listen or "127.0.0.1:0").rpartition(":")[0]
    return socket.gethostname() if host.strip("[]") in ("", "0.0.0.0", "::") else host
