"""The readiness of a fleet: each router sees all workers ready, and all routers."""

from collections.abc import Sequence
from typing import Any

from simulation.plan import TENANTS


def missing(world: Any) -> Sequence[str]:
    """The part of a world's fleet that is not ready, in words."""
    fleet = world.plan.fleet
    down = [name for name in (*world.workers, *fleet.router_names) if not world.is_up(name)]
    found = [f"{name} is down" for name in down]
    for name in fleet.router_names:
        if name in down:
            continue
        peers = world.hosts[name].path.peers
        if peers is not None and peers.count < fleet.routers:
            # Until then each of them lends what all have together, or nothing.
            found.append(f"{name} does not know all routers")
        workers = {one.record.worker_id: one for one in world.hosts[name].cluster.workers}
        found += [f"{name} does not know {one}" for one in world.workers if one not in workers]
        found += [f"{name} has {one}, which has left for good" for one in workers if one in world.absent]
        found += [f"{name}: {one}: {worker.problem}" for one, worker in workers.items() if worker.problem]
    return found or _unlent(world)


def _unlent(world: Any) -> Sequence[str]:
    """The quotas that no router lends: none does so in the first seconds of its record."""
    if not world.plan.fleet.has_quotas:
        return ()
    peers = [world.hosts[name].path.peers for name in world.plan.fleet.router_names]
    return [
        f"no router lends the quota of {tenant}"
        for tenant in TENANTS
        if all(one is not None and one.lends_since(tenant) is None for one in peers)
    ]
