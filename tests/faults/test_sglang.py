"""Faults of workers on SGLang: a sample of the matrix, with kernels whose result does not depend on the batch.

They are run by hand with `-m requires_sglang`: drawn answers on a GPU (BATON_TEST_DEVICE=cuda), greedy ones on CPUs.
"""

import json
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, FleetPlan, fleet
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
SHAPE = Shape(long_tokens=1500, short_tokens=60, max_tokens=60, pause_seconds=18.0, is_greedy=not sglang.ON_GPU)
AT_ONCE = 6
APART = [
    Cell("client", "prefilling", "leave"),
    Cell("client", "decoding", "cancel"),
    Cell("prefill", "decoding", "cut"),
    Cell("prefill", "prefilling", "kill"),
]


WHOLE = [Cell("client", "decoding", "leave"), Cell("decode", "decoding", "kill"), Cell("decode", "prefilling", "kill")]


def _plan(name: str, etcd: EtcdServer, folder: Path, prefill: int, decode: int) -> FleetPlan:
    (folder / "model").mkdir()
    checkpoint = save_qwen3(folder / "model", sglang.HEAD_DIM)
    engine = sglang.settings(checkpoint, free_ports("127.0.0.1", 1), ARGUMENTS)
    more = {"canary_seconds": 5.0, "canary_patience_seconds": 60.0, "whole_requests": not prefill}
    worker = (
        f"engine={json.dumps({**engine, **more})}",
        f"handoff.lease_seconds={sglang.LEASE_SECONDS}",
        "drain_seconds=1",
    )
    return FleetPlan(name, etcd.endpoint, worker, ROUTER, prefill=prefill, decode=decode, engine_seconds=ENGINE_SECONDS)


async def _tried(running: Fleet, title: str, cells: list[Cell]) -> None:
    trials = Trials(running, sglang.LEASE_SECONDS, SHAPE)
    await trials.learn()
    reports: list[Report] = []
    for cell in cells:
        reports.append(await trials.run(cell, AT_ONCE))
        print("\n" + table(f"faults, SGLang, {title}", reports), *reports[-1].faults, sep="\n", flush=True)
    assert [fault for report in reports for fault in report.faults] == []


async def test_whatever_happens_to_two_roles_nothing_is_lost(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    with sglang.installed():
        async with fleet(_plan("sglang", shared_etcd, tmp_path, 1, 1), tmp_path) as running:
            await _tried(running, "prefill and decode", APART)


@pytest.mark.skipif(
    sglang.ON_GPU, reason="needs float32: what a killed worker decoded, another one computes by other kernels"
)
async def test_whatever_happens_to_whole_requests_nothing_is_lost(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    with sglang.installed():
        async with fleet(_plan("sglang-whole", shared_etcd, tmp_path, 0, 2), tmp_path) as running:
            await _tried(running, "two decode workers", WHOLE)
