"""Faults of TensorRT-LLM workers, on the stand-in: KV that the engine moves itself is neither lost nor mixed up."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fake_tensorrt_llm.knobs import Knobs
from support.cluster.fleet import FleetPlan, fleet
from support.engines.checkpoints import save_llama
from support.faults.cells import Cell, Disturbance, Step
from support.faults.table import table
from support.faults.trials import Shape, Trials
from support.servers.etcd import EtcdServer

FULL = os.environ.get("BATON_FAULTS") == "full"
LEASE_SECONDS = 1.0
# KV that is not fetched is freed after this in any case.
TRANSFER_SECONDS = 1.6
TRANSCEIVER = f"{{backend: NIXL, max_tokens_in_buffer: 2048, kv_transfer_timeout_ms: {int(TRANSFER_SECONDS * 1000)}}}"
CACHE = "{tokens_per_block: 16, max_tokens: 65536}"
ARGS = f"{{max_seq_len: 2048, max_batch_size: 64, kv_cache_config: {CACHE}, cache_transceiver_config: {TRANSCEIVER}}}"
ROUTER = (
    "probe={interval_seconds: 0.3, timeout_seconds: 0.7, hung_seconds: 1.5}",
    "routing.session_slack=1000",
    "retry.budget_floor=1000",
    "drain_seconds=1",
)
# Trials compare sampled answers of full batches, which upstream's sampler does not reproduce: noise_by_row is off.
# At the first step of a request it is either its prompt that takes long, or the way of its KV.
SLOW = {
    "prompt": Knobs(step_seconds=0.02, prompt_seconds=0.8, noise_by_row=False),
    "transfer": Knobs(step_seconds=0.02, fetch_seconds=0.8, noise_by_row=False),
}


def cells(slow: str) -> list[Cell]:
    """The faults of an engine that takes no fault plans: at the steps that last by themselves."""
    if not FULL:
        return [
            Cell("prefill", "prefilling", "kill"),
            Cell("decode", "decoding", "kill"),
            Cell("client", "prefilling", "leave"),
        ]
    steps: tuple[Step, ...] = ("prefilling", "decoding") if slow == "prompt" else ("prefilling",)
    by_process: tuple[Disturbance, ...] = ("kill", "pause", "cut", "freeze")
    by_client: tuple[Disturbance, ...] = ("leave", "deadline", "cancel")
    found = [Cell(target, step, what) for what in by_process for target in ("prefill", "decode") for step in steps]
    return found + [Cell("client", step, what) for what in by_client for step in steps]


@pytest.mark.timeout(1200 if FULL else 300)
@pytest.mark.parametrize("slow", SLOW if FULL else ["transfer"])
async def test_whatever_happens_to_kv_that_engines_move_nothing_is_lost(
    slow: str, shared_etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = tmp_path / "fabric"
    fabric.mkdir()
    for name, value in replace(SLOW[slow], fabric=str(fabric)).to_environment().items():
        monkeypatch.setenv(name, value)
    model = save_llama(tmp_path / "model")
    engine = f"engine={{kind: trtllm, model: {model}, name: demo, args: {ARGS}, handoff_deadline_seconds: 1.3}}"
    plan = FleetPlan(
        f"trtllm-{slow}",
        shared_etcd.endpoint,
        (engine, f"handoff.lease_seconds={LEASE_SECONDS}", "drain_seconds=1"),
        ROUTER,
        module="fake_tensorrt_llm",
    )
    async with fleet(plan, tmp_path) as running:
        trials = Trials(
            running, TRANSFER_SECONDS, Shape(long_tokens=1000, short_tokens=40, max_tokens=60, pause_seconds=8.0)
        )
        await trials.learn()
        reports = [await trials.run(cell, 6 if FULL else 3) for cell in cells(slow)]
    print("\n" + table(f"faults, TensorRT-LLM's stand-in, slow {slow}", reports))
    assert [fault for report in reports for fault in report.faults] == []
