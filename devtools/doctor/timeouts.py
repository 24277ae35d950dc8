"""Checks the order of timeouts across a deployment, as docs/production.md requires."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from devtools.doctor.deployment import ConfiguredProcess, EnvoyFile, seconds
from devtools.doctor.finding import Finding, broken, warning, well
from rpc.timeouts import LEASE_ANSWER_SECONDS, MIN_PING_SECONDS

SERVICE = "/baton.inference.v1.InferenceService/"

# Envoy's own, where its file says nothing.
ENVOY_STREAM_IDLE_SECONDS = 300.0
ENVOY_ROUTE_SECONDS = 15.0
SEE = 'see "Timeouts that have to be ordered" in docs/production.md'


@dataclass(frozen=True, slots=True)
class NamedDuration:
    """A duration and its name."""

    name: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} ({self.seconds:g} s)"


def check_timeouts(processes: Sequence[ConfiguredProcess], envoys: Sequence[EnvoyFile]) -> Iterator[Finding]:
    """One finding for each violated order, and one for each process or Envoy without any."""
    routers = [each for each in processes if each.is_router]
    workers = [each for each in processes if not each.is_router]
    for process in processes:
        own = list(_of_router(process) if process.is_router else _of_worker(process))
        yield from own or [well(f"{process.name}: its timeouts are in order")]
    yield from _of_probes(routers, workers)
    for envoy in envoys:
        own = list(_of_envoy(envoy, routers))
        yield from own or [well(f"{envoy.name}: its timeouts are in order")]


def _of_router(router: ConfiguredProcess) -> Iterator[Finding]:
    request = NamedDuration("limits.request_timeout_seconds", router.seconds("limits.request_timeout_seconds"))
    drain = NamedDuration("drain_seconds", router.seconds("drain_seconds"))
    if drain.seconds < request.seconds:
        yield warning(f"{router.name}: {request} is over {drain}: an upgrade cuts the longest streams", SEE)
    yield from _of_end(router, NamedDuration("announce_seconds", router.seconds("announce_seconds")))


def _of_worker(worker: ConfiguredProcess) -> Iterator[Finding]:
    lease = NamedDuration("handoff.lease_seconds", worker.seconds("handoff.lease_seconds"))
    yield from _of_end(worker, lease)
    answer = NamedDuration("the wait for the answer to a renewal", LEASE_ANSWER_SECONDS)
    yield from _ordered(worker.name, answer, lease, "one slow renewal loses a handoff")
    transfer = worker.kv_transfer_seconds
    if transfer is None:
        return
    fetched = NamedDuration("engine.handoff_deadline_seconds", worker.seconds("engine.handoff_deadline_seconds"))
    limit = NamedDuration("kv_transfer_timeout_ms", transfer)
    for shorter in (lease, fetched):
        yield from _ordered(worker.name, shorter, limit, "TensorRT-LLM frees KV that is still needed")
    stalled = NamedDuration("engine.stall_seconds", worker.seconds("engine.stall_seconds"))
    yield from _ordered(worker.name, limit, stalled, "an engine that waits for a transfer is treated as failed")


def _of_end(process: ConfiguredProcess, beside: NamedDuration) -> Iterator[Finding]:
    if process.start.grace_seconds is None:
        return
    drain, leaving = process.seconds("drain_seconds"), process.start.leaving_seconds
    parts = [*(["preStop"] if leaving else []), "drain_seconds", beside.name]
    needed = NamedDuration(" + ".join(parts), leaving + drain + beside.seconds)
    grace = NamedDuration("the grace period before it is killed", process.start.grace_seconds)
    yield from _ordered(process.name, needed, grace, "it is killed before it has drained")


def _of_probes(routers: Sequence[ConfiguredProcess], workers: Sequence[ConfiguredProcess]) -> Iterator[Finding]:
    for router in routers:
        hung = NamedDuration("probe.hung_seconds", router.seconds("probe.hung_seconds"))
        for worker in workers:
            key = NamedDuration(
                f"registry.lease_ttl_seconds of {worker.name}", worker.seconds("registry.lease_ttl_seconds")
            )
            yield from _ordered(router.name, hung, key, "a hung worker is only noticed when its registration expires")


def _serves(match: Mapping[str, Any]) -> bool:
    """True if a route matches the calls of InferenceService."""
    regex = match.get("safe_regex", {}).get("regex", "")
    return match.get("prefix") == SERVICE or re.fullmatch(regex, f"{SERVICE}Generate") is not None


def _of_envoy(envoy: EnvoyFile, routers: Sequence[ConfiguredProcess]) -> Iterator[Finding]:
    limits, interval = list(_stream_limits(envoy)), _health_interval(envoy)
    for router in routers:
        request = NamedDuration(
            f"limits.request_timeout_seconds of {router.name}", router.seconds("limits.request_timeout_seconds")
        )
        for limit in limits:
            yield from _ordered(envoy.name, request, limit, "Envoy cuts streams that are still running")
        announce = NamedDuration(f"announce_seconds of {router.name}", router.seconds("announce_seconds"))
        why = "Envoy learns from failed requests that a router is leaving"
        if interval is not None and announce.seconds <= interval:
            health = NamedDuration("the interval of its health checks", interval)
            yield warning(f"{envoy.name}: {health} is not under {announce}: {why}", SEE)
    for cluster in envoy.value["static_resources"].get("clusters", ()):
        yield from _of_pings(envoy, cluster)


def _of_pings(envoy: EnvoyFile, cluster: dict[str, Any]) -> Iterator[Finding]:
    for interval in _all(cluster, "connection_keepalive"):
        ping = NamedDuration(f"{cluster['name']}: connection_keepalive.interval", seconds(interval["interval"]))
        if ping.seconds < MIN_PING_SECONDS:
            least = NamedDuration("the routers' least ping interval", MIN_PING_SECONDS)
            yield broken(f'{envoy.name}: {ping} is under {least}: connections close with "too many pings"', SEE)


def _stream_limits(envoy: EnvoyFile) -> Iterator[NamedDuration]:
    """The timeouts that end a stream of the public API. 0 disables one."""
    for manager in _all(envoy.value["static_resources"].get("listeners", ()), "typed_config"):
        routes = [each for table in _all(manager, "route_config") for found in _all(table, "routes") for each in found]
        for route in (each["route"] for each in routes if _serves(each["match"])):
            yield NamedDuration(
                "stream_idle_timeout", _seconds(manager, "stream_idle_timeout", ENVOY_STREAM_IDLE_SECONDS)
            )
            yield NamedDuration("the route's timeout", _seconds(route, "timeout", ENVOY_ROUTE_SECONDS))
            yield NamedDuration("the route's idle_timeout", _seconds(route, "idle_timeout", 0.0))


def _seconds(section: dict[str, Any], key: str, default: float) -> float:
    value = seconds(section[key]) if key in section else default
    return value or float("inf")


def _health_interval(envoy: EnvoyFile) -> float | None:
    checks = [check for found in _all(envoy.value["static_resources"], "health_checks") for check in found]
    return max((seconds(check["interval"]) for check in checks), default=None)


def _ordered(name: str, shorter: NamedDuration, longer: NamedDuration, otherwise: str) -> Iterator[Finding]:
    if shorter.seconds >= longer.seconds:
        yield broken(f"{name}: {shorter} is not under {longer}: {otherwise}", SEE)


def _all(value: Any, key: str) -> Iterator[Any]:
    """The values of a key at every depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from _all(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _all(inner, key)
