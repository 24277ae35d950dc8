"""`python -m services` for an operator: start, settings, metrics, signals, exit codes."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from support.clients.worker_calls import WorkerCalls, calls_to, decode_request
from support.cluster.processes import ROOT, process
from support.cluster.workers import LEASE_SECONDS, worker_process
from support.eventually import PATIENCE_SECONDS
from support.servers.etcd import free_port

from baton.engine.v1 import worker_pb2
from baton.errors import EngineFailed, Unavailable
from runtime.aio import timeout


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_an_unknown_role_is_refused_naming_it_and_the_valid_ones() -> None:
    ended = _run("deploy/config/worker.yaml", "roles=[prefil]")
    assert ended.returncode == 2
    assert "roles[0]" in ended.stderr
    assert "prefill, decode" in ended.stderr


def test_an_unknown_key_is_refused_by_its_path() -> None:
    ended = _run("deploy/config/worker.yaml", "handoff.lease=3")
    assert ended.returncode == 2
    assert "handoff.lease" in ended.stderr


@pytest.mark.parametrize("name", ["worker", "prefill", "decode"])
def test_every_configuration_that_ships_can_be_printed(name: str) -> None:
    ended = _run(f"deploy/config/{name}.yaml", "handoff.lease_seconds=3", "--print-config")
    assert ended.returncode == 0
    assert "handoff.lease_seconds = 3.0  # override" in ended.stdout
    assert 'engine.kind = "pytorch"  # file' in ended.stdout
    assert "metrics_listen" in ended.stdout


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    engine = f"engine={{kind: simulated, model: {tmp_path}}}"
    ended = _run("deploy/config/worker.yaml", "registry.kind=memory", engine)
    assert ended.returncode == 2
    assert "tokenizer.json" in ended.stderr


async def test_sigterm_lets_what_runs_finish_and_exits_with_0(tmp_path: Path) -> None:
    engine = "engine={kind: simulated, decode_step_seconds: 0.02}"
    with worker_process("decode", tmp_path, engine, "drain_seconds=20", start=process) as worker:
        async with calls_to(worker.address) as calls:
            call = calls.decodes.Decode(decode_request(max_tokens=40))
            await call.read()
            worker.popen.terminate()
            received = 0
            while (answer := await call.read()) and answer.WhichOneof("event") != "finished":
                received += len(answer.tokens.token_ids)
            assert received == 40
        assert await asyncio.to_thread(worker.popen.wait, PATIENCE_SECONDS) == 0


async def test_sigterm_waits_for_handoffs_for_one_lease_at_most(tmp_path: Path) -> None:
    with worker_process("prefill", tmp_path) as worker:
        async with calls_to(worker.address) as calls:
            await calls.prefill()
            started = asyncio.get_running_loop().time()
            assert await asyncio.to_thread(worker.terminate) == 0
            assert asyncio.get_running_loop().time() - started < 10 * LEASE_SECONDS


async def test_a_worker_that_drains_takes_no_more_requests(tmp_path: Path) -> None:
    engine = "engine={kind: simulated, decode_step_seconds: 0.05}"
    with worker_process("decode", tmp_path, engine, "drain_seconds=20") as worker:
        async with calls_to(worker.address) as calls:
            call = calls.decodes.Decode(decode_request(max_tokens=600))
            await call.read()
            os.kill(worker.popen.pid, signal.SIGTERM)
            with pytest.raises(Unavailable):
                await _call_until_refused(calls)
            call.cancel()


async def test_a_drain_that_was_asked_for_lets_what_runs_finish_and_ends_the_process_with_0(tmp_path: Path) -> None:
    engine = "engine={kind: simulated, decode_step_seconds: 0.02}"
    with worker_process("decode", tmp_path, engine, start=process) as worker:
        async with calls_to(worker.address) as calls:
            decoding = asyncio.create_task(calls.decode(decode_request(max_tokens=80)))
            await until_running(calls)
            seen = [one async for one in calls.worker.Drain(worker_pb2.DrainRequest(grace=Duration(seconds=20)))]
            assert (seen[0].running, seen[0].drained) == (1, False)
            assert [one.drained for one in seen].index(True) == len(seen) - 1
            assert len((await decoding).token_ids) == 80
        assert await asyncio.to_thread(worker.popen.wait, PATIENCE_SECONDS) == 0


async def test_a_drain_waits_until_what_is_held_was_pulled(tmp_path: Path) -> None:
    with worker_process("prefill", tmp_path, "handoff.lease_seconds=30") as worker:
        async with calls_to(worker.address) as calls:
            handoff = await calls.prefill()
            drain = calls.worker.Drain(worker_pb2.DrainRequest(grace=Duration(seconds=20)))
            assert (await drain.read()).handoffs_held == 1
            with pytest.raises(Unavailable):
                await calls.prefill("late")
            assert (await calls.release(handoff)).still_valid
            assert (await drain.read()).drained
        assert await asyncio.to_thread(worker.popen.wait, PATIENCE_SECONDS) == 0


async def until_running(calls: WorkerCalls) -> None:
    async with timeout(PATIENCE_SECONDS):
        while not (await calls.worker.GetLoad(worker_pb2.GetLoadRequest())).load.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _call_until_refused(calls: WorkerCalls) -> None:
    while True:
        await calls.decode(decode_request(request_id="late", max_tokens=1))


async def test_an_engine_that_fails_ends_its_worker_with_exit_code_1(tmp_path: Path) -> None:
    engine = "engine={kind: simulated, fail_after_tokens: 30}"
    with worker_process("decode", tmp_path, engine, start=process) as worker:
        async with calls_to(worker.address) as calls:
            with pytest.raises(EngineFailed, match="as configured"):
                await calls.decode(decode_request(max_tokens=100))
        assert await asyncio.to_thread(worker.popen.wait, PATIENCE_SECONDS) == 1


async def test_metrics_tell_of_blocks_and_handoffs(tmp_path: Path) -> None:
    port = free_port()
    with worker_process("prefill", tmp_path, f"metrics_listen=127.0.0.1:{port}", "handoff.lease_seconds=10") as worker:
        async with calls_to(worker.address) as calls:
            await calls.prefill()
            text = ""
            while "baton_handoffs_held 1.0" not in text:
                text = await asyncio.to_thread(_scrape, port)
                await asyncio.sleep(0.05)
    assert 'baton_kv_blocks{state="total"} 64.0' in text
    assert 'baton_kv_blocks{state="used"} 4.0' in text
    assert 'baton_kv_blocks{state="held"} 4.0' in text
    assert "baton_model_load_seconds" in text
    assert "baton_handoff_lease_expiries_total 0.0" in text
    assert "baton_handoff_confirmations_refused_total 0.0" in text


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())
