"""Faults of workers on vLLM: a sample of the matrix, and ten cancelled prompts. `make vllm-faults` runs it.

Starting an engine takes a minute or more on a CPU, so the sample runs no more than two at a time. With
BATON_FAULTS=full, three run, and the whole matrix on them, for half an hour.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, FleetPlan, fleet
from support.engines import vllm
from support.engines.checkpoints import save_qwen3
from support.faults.cancelled_prefills import cancel_prefills
from support.faults.cells import Cell, all_cells
from support.faults.table import table
from support.faults.trials import Report, Shape, Trials
from support.servers.etcd import EtcdServer

FULL = os.environ.get("BATON_FAULTS") == "full"
pytestmark = [pytest.mark.requires_vllm, pytest.mark.timeout(4 * 3600 if FULL else 3000)]

ENGINE_SECONDS = 900.0
ARGUMENTS = {"max_model_len": 2048, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 2048}
ROUTER = (
    "probe={interval_seconds: 0.5, timeout_seconds: 5, hung_seconds: 10}",
    "routing.session_slack=1000",
    "retry.budget_floor=1000",
    "drain_seconds=1",
)
SHAPE = Shape(long_tokens=1500, short_tokens=60, max_tokens=60, pause_seconds=18.0)
AT_ONCE = 6
# A killed engine starts again for minutes, and each pause lasts longer than a probe.
ORDER = ("leave", "deadline", "cancel", "cut", "kill", "pause", "freeze")
APART = [
    Cell("client", "prefilling", "leave"),
    Cell("client", "decoding", "cancel"),
    Cell("prefill", "decoding", "cut"),
    Cell("prefill", "prefilling", "kill"),
]
WHOLE = [Cell("client", "decoding", "leave"), Cell("decode", "decoding", "kill"), Cell("decode", "prefilling", "kill")]


def _plan(name: str, etcd: EtcdServer, folder: Path, prefill: int, decode: int) -> FleetPlan:
    (folder / "model").mkdir()
    engine = vllm.settings(save_qwen3(folder / "model", vllm.HEAD_DIM), ARGUMENTS)
    # The engine's test requests find a hung core. They take blocks for moments only.
    canary = {"canary_seconds": 5.0, "canary_patience_seconds": 60.0}
    worker = (
        f"engine={json.dumps({**engine, **canary})}",
        f"handoff.lease_seconds={vllm.LEASE_SECONDS}",
        "drain_seconds=1",
    )
    return FleetPlan(name, etcd.endpoint, worker, ROUTER, prefill=prefill, decode=decode, engine_seconds=ENGINE_SECONDS)


async def _tried(running: Fleet, title: str, cells: list[Cell]) -> None:
    trials = Trials(running, vllm.LEASE_SECONDS, SHAPE)
    await trials.learn()
    reports: list[Report] = []
    try:
        for cell in cells:
            reports.append(await trials.run(cell, AT_ONCE))
            print(_line(reports[-1]), flush=True)
    finally:
        print("\n" + table(f"faults, vLLM, {title}", reports) if reports else "no cell has ended", flush=True)
    assert [fault for report in reports for fault in report.faults] == []


def _line(report: Report) -> str:
    """The progress of a long run."""
    cell, ends = report.cell, dict(report.ends)
    return f"{cell.target} {cell.step} {cell.disturbance}: {ends}, {report.blocks} blocks left {list(report.faults)}"


@pytest.mark.skipif(not FULL, reason="takes half an hour: BATON_FAULTS=full")
async def test_whatever_happens_at_any_step_nothing_is_lost(
    shared_etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    plan = replace(_plan("vllm-full", shared_etcd, tmp_path, 1, 2), module="support.engines.vllm_with_faults")
    plan = replace(plan, router=(*plan.router, "allow_faults=true"))
    cells = sorted((cell for cell in all_cells() if not cell.has_image), key=lambda cell: ORDER.index(cell.disturbance))
    with vllm.installed():
        async with fleet(plan, tmp_path) as running:
            await _tried(running, "the whole matrix", cells)


async def test_whatever_happens_to_two_roles_nothing_is_lost(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    with vllm.installed():
        async with fleet(_plan("vllm-apart", shared_etcd, tmp_path, 1, 1), tmp_path) as running:
            await cancel_prefills(running, "vllm")
            await _tried(running, "prefill and decode", APART)


async def test_whatever_happens_to_whole_requests_nothing_is_lost(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    with vllm.installed():
        async with fleet(_plan("vllm-whole", shared_etcd, tmp_path, 0, 2), tmp_path) as running:
            await _tried(running, "two decode workers", WHOLE)
