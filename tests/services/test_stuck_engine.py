"""A worker whose engine hangs ends its process, so that it is restarted."""

import asyncio
import subprocess
import sys
import time

from support.cluster.processes import ROOT
from support.engines.checkpoints import DEMO

# A worker as `python -m services` runs it, whose engine's first step never ends.
STUCK = """
import asyncio, sys, threading
from runtime.config import load
from runtime.process import run
from services.config import WorkerConfig
from services.engines.prompt import Prompt, Sampling
from services.server import host_worker
from services.worker import supervise

config = load(WorkerConfig, sys.argv[1], sys.argv[2:]).value.named()

async def work(stopping):
    async with host_worker(config) as worker:
        worker.engine.runner.start = lambda _chunks: threading.Event().wait()
        never = asyncio.ensure_future(worker.engine.prefill(Prompt((1, 2)), Sampling(max_tokens=4)))
        await supervise(worker, stopping)

run(work)
"""


async def test_a_worker_with_a_stuck_engine_ends_with_exit_code_1() -> None:
    options = ["registry.kind=memory", "listen=127.0.0.1:0", "metrics_listen=''", "engine.stall_seconds=0.5"]
    command = [sys.executable, "-c", STUCK, "deploy/config/worker.yaml", f"engine.model={DEMO}", *options]
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1, log.decode()[-2000:]
    assert b"engine shutdown timed out; exiting" in log
    assert time.monotonic() - started < 60
