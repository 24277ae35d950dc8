"""Faults of workers on SGLang: a sample of the matrix, with kernels whose result does not depend on the batch.

It is run by hand, on a GPU: BATON_TEST_DEVICE=cuda and `-m requires_sglang`.
"""

import json
from pathlib import Path

import pytest
from support.cluster.fleet import FleetPlan, fleet
from support.engines import sglang
from support.engines.checkpoints import save_qwen3
from support.faults.cells import Cell
from support.faults.table import table
from support.faults.trials import Report, Shape, Trials
from support.servers.etcd import EtcdServer

from services.engines.external.surroundings import free_ports

pytestmark = [pytest.mark.requires_sglang, pytest.mark.timeout(3000)]

ENGINE_SECONDS = 900.0
ARGUMENTS = {"context_length": 2048, "max_total_tokens": 12_800, "chunked_prefill_size": 2048}
ROUTER = (
    "probe={interval_seconds: 0.5, timeout_seconds: 5, hung_seconds: 10}",
    "routing.session_slack=1000",
    "retry.budget_floor=1000",
    "drain_seconds=1",
)
SHAPE = Shape(long_tokens=1500, short_tokens=60, max_tokens=60, pause_seconds=18.0)
AT_ONCE = 6
APART = [
    Cell("client", "prefilling", "leave"),
    Cell("client", "decoding", "cancel"),
    Cell("prefill", "decoding", "cut"),
    Cell("prefill", "prefilling", "kill"),
]


async def test_whatever_happens_to_two_roles_nothing_is_lost(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    if not sglang.ON_GPU:
        pytest.skip("BATON_TEST_DEVICE=cuda runs this test: on CPUs SGLang has no seeds")
    (tmp_path / "model").mkdir()
    checkpoint = save_qwen3(tmp_path / "model", sglang.HEAD_DIM)
    engine = sglang.settings(checkpoint, free_ports("127.0.0.1", 1), ARGUMENTS)
    canary = {"canary_seconds": 5.0, "canary_patience_seconds": 60.0}
    worker = (
        f"engine={json.dumps({**engine, **canary})}",
        f"handoff.lease_seconds={sglang.LEASE_SECONDS}",
        "drain_seconds=1",
    )
    plan = FleetPlan("sglang", shared_etcd.endpoint, worker, ROUTER, prefill=1, decode=1, engine_seconds=ENGINE_SECONDS)
    reports: list[Report] = []
    with sglang.installed():
        async with fleet(plan, tmp_path) as running:
            trials = Trials(running, sglang.LEASE_SECONDS, SHAPE)
            await trials.learn()
            for cell in APART:
                reports.append(await trials.run(cell, AT_ONCE))
                print("\n" + table("faults, SGLang, prefill and decode", reports), flush=True)
    assert [fault for report in reports for fault in report.faults] == []
