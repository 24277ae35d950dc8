"""Whether timeouts are ordered as docs/production.md says, over all the processes of a deployment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from client.doctor.deployment import EnvoyFile, seconds
from client.doctor.effective import Process
from client.doctor.finding import Finding, broken, warning, well

SERVICE = "/baton.inference.v1.InferenceService/"
# rpc.serve closes connections that ping more often.
LEAST_PING_SECONDS = 5.0
# Envoy's own, where its file says nothing.
ENVOY_STREAM_IDLE_SECONDS = 300.0
ENVOY_ROUTE_SECONDS = 15.0
SEE = "docs/production.md says what has to be longer than what"


@dataclass(frozen=True, slots=True)
class Span:
    """A length of time, and what it is called."""

    name: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} ({self.seconds:g} s)"


def check_timeouts(processes: Sequence[Process], envoys: Sequence[EnvoyFile]) -> Iterator[Finding]:
    """One finding for each order that does not hold; one that all is well for everything else."""
    routers = [each for each in processes if each.is_router]
    workers = [each for each in processes if not each.is_router]
    for process in processes:
        own = list(_of_router(process) if process.is_router else _of_worker(process))
        yield from own or [well(f"{process.name}: its timeouts are ordered")]
    yield from _of_probes(routers, workers)
    for envoy in envoys:
        own = list(_of_envoy(envoy, routers))
        yield from own or [well(f"{envoy.name}: its timeouts are ordered")]


def _of_router(router: Process) -> Iterator[Finding]:
    request = Span("limits.request_timeout_seconds", router.seconds("limits.request_timeout_seconds"))
    drain = Span("drain_seconds", router.seconds("drain_seconds"))
    if drain.seconds < request.seconds:
        yield warning(f"{router.name}: {request} is over {drain}: an upgrade cuts the longest answers", SEE)
    yield from _of_end(router, Span("announce_seconds", router.seconds("announce_seconds")))


def _of_worker(worker: Process) -> Iterator[Finding]:
    lease = Span("handoff.lease_seconds", worker.seconds("handoff.lease_seconds"))
    yield from _of_end(worker, lease)
    transfer = worker.kv_transfer_seconds
    if transfer is None:
        return
    fetched = Span("engine.handoff_deadline_seconds", worker.seconds("engine.handoff_deadline_seconds"))
    limit = Span("kv_transfer_timeout_ms", transfer)
    for shorter in (lease, fetched):
        yield from _ordered(worker.name, shorter, limit, "TensorRT-LLM gives KV up that is still wanted")
    stalled = Span("engine.stall_seconds", worker.seconds("engine.stall_seconds"))
    yield from _ordered(worker.name, limit, stalled, "an engine that waits for a transfer counts as failed")


def _of_end(process: Process, beside: Span) -> Iterator[Finding]:
    if process.start.grace_seconds is None:
        return
    drain, leaving = process.seconds("drain_seconds"), process.start.leaving_seconds
    parts = [*(["preStop"] if leaving else []), "drain_seconds", beside.name]
    needed = Span(" + ".join(parts), leaving + drain + beside.seconds)
    grace = Span("the time before it is killed", process.start.grace_seconds)
    yield from _ordered(process.name, needed, grace, "the kill comes before the end of the drain")


def _of_probes(routers: Sequence[Process], workers: Sequence[Process]) -> Iterator[Finding]:
    for router in routers:
        hung = Span("probe.hung_seconds", router.seconds("probe.hung_seconds"))
        for worker in workers:
            key = Span(f"registry.lease_ttl_seconds of {worker.name}", worker.seconds("registry.lease_ttl_seconds"))
            yield from _ordered(router.name, hung, key, "a hung worker is only noticed when its key goes")


def _of_envoy(envoy: EnvoyFile, routers: Sequence[Process]) -> Iterator[Finding]:
    limits, interval = list(_stream_limits(envoy)), _health_interval(envoy)
    for router in routers:
        request = Span(f"limits.request_timeout_seconds of {router.name}", _request_seconds(router))
        for limit in limits:
            yield from _ordered(envoy.name, request, limit, "Envoy cuts a stream, and nobody says why")
        announce = Span(f"announce_seconds of {router.name}", router.seconds("announce_seconds"))
        why = "Envoy learns by failing requests that a router leaves"
        if interval is not None and announce.seconds <= interval:
            health = Span("the interval of its health checks", interval)
            yield warning(f"{envoy.name}: {health} is not under {announce}: {why}", SEE)
    for cluster in envoy.value["static_resources"].get("clusters", ()):
        yield from _of_pings(envoy, cluster)


def _of_pings(envoy: EnvoyFile, cluster: dict[str, Any]) -> Iterator[Finding]:
    for interval in _all(cluster, "connection_keepalive"):
        ping = Span(f"{cluster['name']}: connection_keepalive.interval", seconds(interval["interval"]))
        if ping.seconds < LEAST_PING_SECONDS:
            least = Span("the routers' least ping interval", LEAST_PING_SECONDS)
            yield broken(f'{envoy.name}: {ping} is under {least}: connections close with "too many pings"', SEE)


def _stream_limits(envoy: EnvoyFile) -> Iterator[Span]:
    """What ends a stream of the public API, or an idle one. 0 is never."""
    for manager in _all(envoy.value["static_resources"].get("listeners", ()), "typed_config"):
        routes = [each for table in _all(manager, "route_config") for found in _all(table, "routes") for each in found]
        for route in (each["route"] for each in routes if each["match"].get("prefix") == SERVICE):
            yield Span("stream_idle_timeout", _seconds(manager, "stream_idle_timeout", ENVOY_STREAM_IDLE_SECONDS))
            yield Span("the route's timeout", _seconds(route, "timeout", ENVOY_ROUTE_SECONDS))
            yield Span("the route's idle_timeout", _seconds(route, "idle_timeout", 0.0))


def _seconds(section: dict[str, Any], key: str, default: float) -> float:
    value = seconds(section[key]) if key in section else default
    return value or float("inf")


def _health_interval(envoy: EnvoyFile) -> float | None:
    checks = [check for found in _all(envoy.value["static_resources"], "health_checks") for check in found]
    return max((seconds(check["interval"]) for check in checks), default=None)


def _request_seconds(router: Process) -> float:
    return router.seconds("limits.request_timeout_seconds")


def _ordered(name: str, shorter: Span, longer: Span, otherwise: str) -> Iterator[Finding]:
    if shorter.seconds >= longer.seconds:
        yield broken(f"{name}: {shorter} is not under {longer}: {otherwise}", SEE)


def _all(value: Any, key: str) -> Iterator[Any]:
    """The values of a key, however deep they lie."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from _all(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _all(inner, key)
