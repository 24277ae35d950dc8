"""A worker whose engine hangs: its process ends, so that it is started anew."""

import asyncio
import subprocess
import sys
import time

from support.checkpoints import DEMO
from support.processes import ROOT

# A worker as `python -m services` runs it, whose engine is given something to do that never ends.
STUCK = """
import asyncio, sys, threading
from rpc.config import load
from rpc.run import run
from services.attending import attend
from services.config import WorkerConfig
from services.host import host_worker

config = load(WorkerConfig, sys.argv[1], sys.argv[2:]).value.named()

async def work(stopping):
    async with host_worker(config) as worker:
        never = asyncio.ensure_future(worker.engine._loop.call(lambda core: threading.Event().wait()))
        await attend(worker, stopping)

run(work)
"""


async def test_a_worker_with_a_stuck_engine_ends_with_exit_code_1() -> None:
    options = ["registry.kind=memory", "listen=127.0.0.1:0", "metrics_listen=''", "engine.stall_seconds=0.5"]
    command = [sys.executable, "-c", STUCK, "deploy/config/worker.yaml", f"engine.model={DEMO}", *options]
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1, log.decode()[-2000:]
    assert b"the engine does not end; the process does" in log
    assert time.monotonic() - started < 60
