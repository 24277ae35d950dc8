"""Where vLLM is not installed, nothing of it is imported, and its engine is refused in one line."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import ConfigError
from services.engines.context import EngineContext
from services.engines.vllm.config import VllmConfig
from services.engines.vllm.factory import open_vllm
from services.engines.vllm.package import open_vllm_package

ROOT = Path(__file__).resolve().parents[4]
absent = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")


@absent
def test_the_engine_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="needs vLLM, which cannot be imported") as refused:
        open_vllm(VllmConfig(model=Path("some/folder")), EngineContext())
    assert "\n" not in refused.value.message


def test_files_of_metrics_for_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/tmp/some")
    with pytest.raises(ConfigError, match="PROMETHEUS_MULTIPROC_DIR"):
        open_vllm_package()


def test_importing_the_engine_imports_neither_vllm_nor_its_sockets() -> None:
    code = "import sys, services.engines.vllm.engine; print('vllm' in sys.modules, 'zmq' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]
