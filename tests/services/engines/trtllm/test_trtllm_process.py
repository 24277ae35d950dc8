"""A worker process ends when its TensorRT-LLM fails, and its requests may be retried on other workers."""

import asyncio
from pathlib import Path

import pytest
from fake_tensorrt_llm.knobs import Knobs
from support.clients.worker_calls import calls_to, decode_request
from support.cluster.processes import process
from support.eventually import PATIENCE_SECONDS

from baton.errors import EngineFailed


async def test_an_engine_that_breaks_fails_what_runs_and_ends_its_process(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in Knobs(crash_after_tokens=30).to_environment().items():
        monkeypatch.setenv(name, value)
    engine = (
        f"engine={{kind: trtllm, model: {checkpoint}, name: demo, whole_requests: true, args: {{max_seq_len: 256}}}}"
    )
    settings = (engine, "registry.kind=memory", "metrics_listen=''", "drain_seconds=0")
    with process("fake_tensorrt_llm", "decode.yaml", settings, tmp_path / "worker.log") as worker:
        worker.wait_until_serving()
        async with calls_to(worker.address) as calls:
            with pytest.raises(EngineFailed, match="illegal memory access"):
                await calls.decode(decode_request(max_tokens=100))
        assert await asyncio.to_thread(worker.popen.wait, PATIENCE_SECONDS) == 1
