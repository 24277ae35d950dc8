"""A real model's answer continues after its decode worker died: the same tokens, penalties and stop strings."""

import asyncio
import os
import uuid
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, FleetPlan, fleet
from support.engines.checkpoints import DEMO
from support.engines.device import DEVICE, ON_DEVICE
from support.faults.cells import Cell, Disturbance, Step
from support.faults.outcomes import Outcome, follow
from support.faults.table import table
from support.faults.trials import Shape, Trials, session_for
from support.servers.etcd import EtcdServer

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import sampling_pb2

FULL = os.environ.get("BATON_FAULTS") == "full"
LEASE_SECONDS = 2.0
_SETTINGS = ", ".join(f"{key}: {value}" for key, value in ON_DEVICE.items())
ENGINE = f"engine={{kind: pytorch, model: {DEMO}, name: demo, threads: 1, kv_cache_bytes: 64MiB, {_SETTINGS}}}"
# On a GPU, which is not shared by so many tests, a sample of the matrix.
TRANSPORTS, TURNS = (["shm", "tcp"], 6) if DEVICE == "cpu" else (["cuda_ipc"], 2)
WORKER = (ENGINE, f"handoff.lease_seconds={LEASE_SECONDS}", "drain_seconds=1")
ROUTER = (
    "probe={interval_seconds: 0.5, timeout_seconds: 1.5, hung_seconds: 3}",
    "routing.session_slack=1000",
    "retry.budget_floor=1000",
    "drain_seconds=1",
)
KILLED_AT_TOKEN = 7
# A byte of text is a token or less: this is text that the answer has, after the kill.
STOP_AFTER_TOKENS = 60

VARIANTS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11, "top_p": 0.95},
    "repetition penalty": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3},
    "presence and frequency": {"temperature": 0.7, "seed": 9, "presence_penalty": 1.5, "frequency_penalty": 0.9},
    "bad words": {"temperature": 1.0, "seed": 4, "bad_words": ["Mia", "fox", "e", ". The"]},
    "biased": {"temperature": 1.0, "seed": 2, "logit_bias": {40: 2.0, 41: -5.0}, "top_k": 20},
}


def request(variant: str, stop: str = "") -> pb.GenerateRequest:
    asked = pb.GenerateRequest(
        prompt="Tell a story about Mia and a fox.",
        sampling=sampling_pb2.SamplingParams(**VARIANTS[variant]),  # type: ignore[arg-type]
    )
    asked.stopping.max_tokens = 160
    asked.stopping.ignore_eos = True
    if stop:
        asked.stopping.stop.append(stop)
    asked.routing.session_key = session_for("decode-0")
    asked.routing.cache_salt = uuid.uuid4().hex
    return asked


async def collect(fleet: Fleet, asked: pb.GenerateRequest, name: str) -> Outcome:
    outcome = Outcome(name)
    await follow(fleet.stub.Generate(asked, timeout=60), outcome)
    assert outcome.is_right, outcome
    return outcome


async def reached(outcomes: list[Outcome], tokens: int) -> None:
    while any(len(outcome.ids) < tokens for outcome in outcomes):  # noqa: ASYNC110
        await asyncio.sleep(0.002)


@pytest.mark.timeout(300)
async def test_a_killed_decode_goes_on_with_the_same_sampling(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    plan = FleetPlan("embedded-kill", shared_etcd.endpoint, WORKER, ROUTER, prefill=1)
    async with fleet(plan, tmp_path) as running:
        undisturbed = {name: await collect(running, request(name), name) for name in VARIANTS}
        stop = undisturbed["seeded"].text[STOP_AFTER_TOKENS : STOP_AFTER_TOKENS + 6]
        stopped = await collect(running, request("seeded", stop), "stopped")
        outcomes = {name: Outcome(name) for name in (*VARIANTS, "stopped")}
        tasks = [
            asyncio.create_task(
                follow(
                    running.stub.Generate(request("seeded", stop) if name == "stopped" else request(name), timeout=60),
                    outcome,
                )
            )
            for name, outcome in outcomes.items()
        ]
        await reached(list(outcomes.values()), KILLED_AT_TOKEN)
        running.nodes["decode-0"].kill()
        await asyncio.gather(*tasks)
    for name, outcome in outcomes.items():
        expected = stopped if name == "stopped" else undisturbed[name]
        assert outcome.finished is not None, outcome
        assert (name, outcome.ids) == (name, expected.ids)
        assert (name, outcome.text) == (name, expected.text)
        assert (name, outcome.finished.migrations) == (name, 1)
        assert outcome.finished.decode_worker_id == "decode-1"
    assert outcomes["stopped"].finished is not None
    assert outcomes["stopped"].finished.stop_string == stop


def cells() -> list[Cell]:
    """The faults of an engine that takes no fault plans: at the steps that last by themselves."""
    steps: tuple[Step, ...] = ("prefilling", "decoding")
    by_process: tuple[Disturbance, ...] = ("kill", "pause", "cut", "freeze")
    by_client: tuple[Disturbance, ...] = ("leave", "deadline", "cancel")
    found = [Cell(target, step, what) for what in by_process for target in ("prefill", "decode") for step in steps]
    return found + [Cell("client", step, what) for what in by_client for step in steps]


@pytest.mark.skipif(not FULL, reason="takes minutes")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", ["prefill", "decode", "client"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_whatever_happens_to_a_real_model_nothing_is_lost(
    transport: str, target: str, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    namespace = f"embedded-{transport}-{target}"
    plan = FleetPlan(namespace, shared_etcd.endpoint, (*WORKER, f"transports=[{transport}]"), ROUTER)
    async with fleet(plan, tmp_path) as running:
        trials = Trials(
            running, LEASE_SECONDS, Shape(short_tokens=40, long_tokens=400, max_tokens=120, pause_seconds=8.0)
        )
        await trials.learn()
        reports = [await trials.run(cell, TURNS) for cell in cells() if cell.target == target]
    print("\n" + table(f"faults, embedded engine, {transport}, {target}", reports))
    assert [fault for report in reports for fault in report.faults] == []
