"""The health of a whole cluster, as HTTP clients read it: /health beside /metrics."""

import time
from pathlib import Path
from typing import Any

from support.cluster import ClusterPlan, cluster
from support.etcd_server import EtcdServer
from support.scraping import get_health

NONE = {"ready": 0, "unhealthy": 0, "draining": 0}
ONE = {"ready": 1, "unhealthy": 0, "draining": 0}


def until_health(address: str, code: int, report: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while (said := get_health(address)) != (code, report):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def test_a_router_lists_roles_and_serves_while_a_decode_worker_does(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    engine = {"kind": "simulated", "name": "demo"}
    with cluster(ClusterPlan(tmp_path.name, shared_etcd.endpoint, engine, metrics=True), tmp_path) as running:
        router = running.metrics["router-0"]
        roles = {"encode": NONE, "prefill": ONE, "decode": ONE}
        until_health(router, 200, {"status": "SERVING", "roles": roles, "models": {"demo": ["decode", "prefill"]}})
        own = {"status": "SERVING", "worker_id": "decode-0", "roles": ["decode"], "model": "demo"}
        assert get_health(running.metrics["decode-0"]) == (200, own)
        assert running.decode[0].terminate() == 0
        roles = {**roles, "decode": NONE}
        until_health(router, 503, {"status": "NOT_SERVING", "roles": roles, "models": {"demo": ["prefill"]}})
