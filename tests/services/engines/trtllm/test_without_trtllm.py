"""Choosing TensorRT-LLM where it is not installed ends with one line that says what to do."""

import importlib.util
from pathlib import Path

import pytest

from baton.errors import ConfigError
from discovery.memory import MemoryRegistry
from services.config import WorkerConfig
from services.server import host_worker

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorrt_llm") is not None, reason="it is installed")


def worker(*roles: str) -> WorkerConfig:
    return WorkerConfig.model_validate({"roles": roles, "engine": {"kind": "trtllm", "model": Path("/model")}})


async def test_a_worker_says_in_one_line_what_to_install_and_where_it_runs() -> None:
    with pytest.raises(ConfigError, match=r"needs TensorRT-LLM.*NVIDIA GPUs.*package index") as refused:
        async with host_worker(worker("decode"), MemoryRegistry("test")):
            pass
    assert "\n" not in refused.value.message


async def test_an_encode_worker_says_the_same() -> None:
    with pytest.raises(ConfigError, match="needs TensorRT-LLM"):
        async with host_worker(worker("encode"), MemoryRegistry("test")):
            pass
