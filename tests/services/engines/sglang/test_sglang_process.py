"""A worker's process on SGLang: its metrics, and its end by a signal and with a process of SGLang."""

import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from support.engines import sglang
from support.engines.checkpoints import save_qwen3
from support.engines.engine_process import engine_process, log_of, until_ready
from support.eventually import eventually

from services.engines.external.surroundings import free_ports

pytestmark = [pytest.mark.requires_sglang, pytest.mark.timeout(1800)]

END_SECONDS = 60.0


@contextmanager
def _worker(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    engine = sglang.settings(save_qwen3(checkpoint, sglang.HEAD_DIM), free_ports("127.0.0.1", 1))
    engine |= {"metrics": True, "canary_seconds": 5.0}
    listen = f"127.0.0.1:{free_ports('127.0.0.1', 1)}"
    with engine_process(folder, engine, sglang.LEASE_SECONDS, listen) as process:
        yield process


async def _ready(folder: Path, process: "subprocess.Popen[bytes]") -> list[int]:
    """Waits until the worker is ready. Returns the ids of SGLang's processes."""
    await until_ready(folder, process)
    return _children(process.pid)


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def _named(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _page(folder: Path) -> str:
    address = yaml.safe_load((folder / "worker.yaml").read_text())["metrics_listen"]
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        return str(answer.read().decode())


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and not re.search(r"\) Z ", status.read_text())


async def test_a_signal_ends_the_worker_and_all_of_sglangs_processes(tmp_path: Path) -> None:
    with sglang.installed(), _worker(tmp_path) as process:
        children = await _ready(tmp_path, process)
        assert len(children) >= 2
        page = _page(tmp_path)
        assert "baton_sglang_aborts_total" in page
        assert "sglang:" in page
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: process.poll() is not None, seconds=END_SECONDS)
        assert process.returncode == 0
        await eventually(lambda: not any(map(_runs, children)), seconds=END_SECONDS)


async def test_a_worker_whose_scheduler_was_lost_ends(tmp_path: Path) -> None:
    with sglang.installed(), _worker(tmp_path) as process:
        children = await _ready(tmp_path, process)
        for pid in children:
            if "sglang::scheduler" in _named(pid):
                os.kill(pid, signal.SIGKILL)
        await eventually(lambda: process.poll() is not None, seconds=END_SECONDS)
        assert process.returncode != 0
        assert "a process of SGLang has ended" in log_of(tmp_path)
        await eventually(lambda: not any(map(_runs, children)), seconds=END_SECONDS)
