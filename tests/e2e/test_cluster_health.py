"""The health of a cluster over HTTP: /health beside /metrics."""

import asyncio
import time
from pathlib import Path
from typing import Any

from support.clients.scraping import get_health
from support.cluster.fleet import PATIENT, FleetPlan, shared_fleet
from support.eventually import PATIENCE_SECONDS
from support.servers.etcd import EtcdServer

NONE = {"ready": 0, "unhealthy": 0, "draining": 0}
ONE = {"ready": 1, "unhealthy": 0, "draining": 0}


def until_health(address: str, code: int, report: Any) -> None:
    """Waits for this report of a router, besides which it says how it knows each worker's cache."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (said := without_caches(*get_health(address))) != (code, report):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def without_caches(code: int, report: Any) -> tuple[int, Any]:
    return code, {key: value for key, value in report.items() if key != "cache_views"}


def test_a_router_lists_roles_and_serves_while_a_decode_worker_does(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    worker = ("engine.kind=simulated", "engine.name=demo")
    plan = FleetPlan(tmp_path.name, shared_etcd.endpoint, worker, (PATIENT,), prefill=1, decode=1, metrics=True)
    with shared_fleet(plan, tmp_path) as running:
        router = running.metrics["router-0"]
        roles = {"encode": NONE, "prefill": ONE, "decode": ONE, "embed": NONE, "diffuse": NONE}
        until_health(router, 200, {"status": "SERVING", "roles": roles, "models": {"demo": ["decode", "prefill"]}})
        own = {"status": "SERVING", "worker_id": "decode-0", "roles": ["decode"], "model": "demo"}
        assert get_health(running.metrics["decode-0"]) == (200, own)
        assert asyncio.run(running.nodes["decode-0"].terminate()) == 0
        roles = {**roles, "decode": NONE}
        until_health(router, 503, {"status": "NOT_SERVING", "roles": roles, "models": {"demo": ["prefill"]}})
