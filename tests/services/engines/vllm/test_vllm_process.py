"""Killed and hung processes of a worker on vLLM: the worker ends when vLLM does, and vLLM when the worker does."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.engines import vllm
from support.engines.checkpoints import save_qwen3
from support.engines.engine_calls import collect, greedy
from support.engines.engine_process import engine_process, log_of, until_ready
from support.eventually import eventually

from baton.errors import HandoffLost
from services.engines.context import EngineContext
from services.engines.kv_transfer import RemoteKv
from services.engines.prompt import Prompt
from services.engines.vllm.config import VllmConfig
from services.engines.vllm.factory import open_vllm

pytestmark = [pytest.mark.requires_vllm, pytest.mark.timeout(1800)]

END_SECONDS = 120.0


@contextmanager
def _worker(folder: Path, **engine: object) -> Iterator["subprocess.Popen[bytes]"]:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    whole = {**vllm.settings(save_qwen3(checkpoint, vllm.HEAD_DIM)), **engine}
    with engine_process(folder, whole, vllm.LEASE_SECONDS) as process:
        yield process


def _vllm_of(pid: int) -> list[psutil.Process]:
    """vLLM's processes, the core first: all but the small one that watches."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if not any("orphans.py" in word for word in child.cmdline())]


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def test_a_killed_worker_leaves_none_of_vllms_processes(tmp_path: Path) -> None:
    with vllm.installed(), _worker(tmp_path) as process:
        await until_ready(tmp_path, process)
        children = _vllm_of(process.pid)
        assert len(children) >= 2
        process.send_signal(signal.SIGKILL)
        await eventually(lambda: not any(map(_runs, children)), seconds=END_SECONDS)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_a_worker_whose_core_was_lost_ends(fault: signal.Signals, tmp_path: Path) -> None:
    # A core that hangs says nothing: only the test requests find it.
    canary = {"canary_seconds": 1.0, "canary_patience_seconds": 10.0}
    with vllm.installed(), _worker(tmp_path, **canary) as process:
        await until_ready(tmp_path, process)
        children = _vllm_of(process.pid)
        core = next(child for child in children if any("EngineCore" in word for word in child.cmdline()))
        core.send_signal(fault)
        await eventually(lambda: process.poll() is not None, seconds=END_SECONDS)
        assert process.returncode != 0
        # vLLM does not shut down with a core that hangs, so the process ends in any case.
        why = "the engine has failed" if fault is signal.SIGKILL else "engine shutdown timed out"
        assert why in log_of(tmp_path)
        await eventually(lambda: not any(map(_runs, children)), seconds=END_SECONDS)


async def test_kv_of_an_engine_that_is_lost_in_the_middle_of_a_read_is_lost_and_harms_no_other(tmp_path: Path) -> None:
    prompt = Prompt(tuple((5 * index * index + index) % 300 + 10 for index in range(150)))
    config = VllmConfig.model_validate(vllm.settings(save_qwen3(tmp_path, vllm.HEAD_DIM)))
    with vllm.installed():
        async with open_vllm(config, EngineContext(("prefill",))) as prefill:
            owners = _vllm_of(os.getpid())
            async with open_vllm(config, EngineContext(("decode",))) as decode:
                assert decode.kv_transfer is not None
                expected = (await collect(decode.decode(replace(prompt, cache_salt="expected"), greedy(12)))).ids
                held = await prefill.prefill(prompt, greedy(12))
                # The read has begun: it waits for the answer of a process that does not run.
                for each in owners:
                    each.suspend()
                source = RemoteKv(replace(prompt, emitted=(held.first_token,)), held.num_tokens, held.engine_state)
                reading = asyncio.create_task(decode.kv_transfer.decode_remote(source, greedy(12)))
                await eventually(lambda: decode.load().blocks_used > 0)
                assert (await collect(decode.decode(replace(prompt, cache_salt="other"), greedy(12)))).ids == expected
                for each in owners:
                    each.kill()
                with pytest.raises(HandoffLost):
                    await reading
                assert decode.healthy
                assert (await collect(decode.decode(prompt, greedy(12)))).ids == expected
                await eventually(lambda: decode.load().blocks_used == 0)
                await eventually(lambda: not prefill.healthy, seconds=END_SECONDS)
