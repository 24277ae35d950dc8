"""GPU metrics, in a worker process whose NVML is a stand-in with two GPUs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clients.scraping import Scrape, scrape
from support.cluster.processes import ROOT, process
from support.cluster.workers import worker_process
from support.servers.etcd import free_port

GIB = 2**30


@contextmanager
def scraped(folder: Path) -> Iterator[Scrape]:
    address = f"127.0.0.1:{free_port()}"
    with worker_process("prefill", folder, f"metrics_listen={address}", start=process):
        yield scrape(address)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "fake_nvml"), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_every_gpu_says_what_it_has_and_does(tmp_path: Path) -> None:
    with scraped(tmp_path) as found:
        assert found.sum("baton_gpu_memory_total_bytes") == 160 * GIB
        assert [found.sum("baton_gpu_memory_used_bytes", gpu=gpu) for gpu in "01"] == [60 * GIB, 61 * GIB]
        assert [found.sum("baton_gpu_temperature_celsius", gpu=gpu) for gpu in "01"] == [61, 62]
        assert found.sum("baton_gpu_utilization_ratio", gpu="0") == 0.75


@pytest.mark.usefixtures("two_gpus")
def test_what_a_gpu_cannot_tell_is_left_out(tmp_path: Path) -> None:
    with scraped(tmp_path) as found:
        assert not found.has("baton_gpu_utilization_ratio", gpu="1")
        assert found.has("baton_gpu_memory_used_bytes", gpu="1")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("visible", "gpus"), [("1", ["1"]), ("GPU-bbbb", ["GPU-bbbb"]), ("0,7,1", ["0"]), ("", [])])
def test_only_gpus_that_cuda_may_use_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, gpus: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with scraped(tmp_path) as found:
        shown = [dict(labels)["gpu"] for labels in found.samples.get("baton_gpu_memory_used_bytes", {})]
    assert shown == gpus


def test_without_a_gpu_there_is_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with scraped(tmp_path) as found:
        assert not found.has("baton_gpu_memory_used_bytes")
        assert found.has("baton_build_info")
