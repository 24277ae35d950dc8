"""The usage of each tenant: of this router alone, and of all routers together, for operators."""

import asyncio
from collections.abc import Iterable
from heapq import nlargest

from baton.errors import BatonError
from baton.inference.v1 import cluster_service_pb2
from router.admission.controller import AdmissionController
from router.peers.link import PeerLink

_Usage = cluster_service_pb2.TenantUsage
_MOST_TENANTS = 1000
_MOST_REQUESTS = 2**32 - 1  # that a message can tell


def own_tenants(admission: AdmissionController) -> list[_Usage]:
    """Tenants with work of the last minute, or that wait or run, as this router knows them; and those with a quota of
    their own whose home is here.
    """
    orders = [queue.order for queue in admission.queues if queue.order.tells_tenants]
    all_of_them = ((order.recent_work(tenant), tenant, order) for order in orders for tenant in order.tenants)
    in_use = (
        (work, tenant, order) for work, tenant, order in all_of_them if work > 0 or tenant.running or tenant.count
    )
    found: dict[str, _Usage] = {}
    for work, tenant, order in nlargest(_MOST_TENANTS, in_use, key=lambda one: (one[0], one[1].count)):
        usage = _Usage(tenant=tenant.name, running=tenant.running, waiting=tenant.count, recent_work=max(0.0, work))
        usage.longest_wait.FromNanoseconds(int(order.longest_wait(tenant) * 1e9))
        _add(found, usage)
    for name, requests, tokens in admission.quotas.left(found):
        _add(found, _Usage(tenant=name, requests_left=requests, tokens_left=tokens))
    return _largest(found.values())


async def all_tenants(
    admission: AdmissionController, links: Iterable[PeerLink]
) -> cluster_service_pb2.ListTenantsResponse:
    """The tenants of all routers. Routers that do not answer are named."""
    links = list(links)
    answers = await asyncio.gather(*(link.list_tenants() for link in links), return_exceptions=True)
    found: dict[str, _Usage] = {}
    response = cluster_service_pb2.ListTenantsResponse()
    for usage in own_tenants(admission):
        _add(found, usage)
    for link, answer in zip(links, answers, strict=True):
        if isinstance(answer, BatonError):
            response.missing_routers.append(link.record.worker_id)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            for usage in answer.tenants[:_MOST_TENANTS]:
                _add(found, usage)
    total = sum(usage.recent_work for usage in found.values())
    for usage in found.values():
        usage.share = usage.recent_work / total if total > 0 else 0.0
    response.tenants.extend(_largest(found.values()))
    return response


def _add(found: dict[str, _Usage], more: _Usage) -> None:
    usage = found.get(more.tenant)
    if usage is None:
        found[more.tenant] = more
        return
    usage.running = min(_MOST_REQUESTS, usage.running + more.running)
    usage.waiting = min(_MOST_REQUESTS, usage.waiting + more.waiting)
    usage.recent_work += more.recent_work
    if more.longest_wait.ToNanoseconds() > usage.longest_wait.ToNanoseconds():
        usage.longest_wait.CopyFrom(more.longest_wait)
    if more.HasField("requests_left"):
        usage.requests_left = more.requests_left
    if more.HasField("tokens_left"):
        usage.tokens_left = more.tokens_left


def _largest(usages: Iterable[_Usage]) -> list[_Usage]:
    ordered = sorted(usages, key=lambda usage: (-usage.recent_work, -usage.waiting, usage.tenant))
    return ordered[:_MOST_TENANTS]
