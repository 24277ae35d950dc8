"""Nothing of vLLM is imported where it is not installed, and its engine is refused in one line."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from baton.errors import ConfigError
from services.engines.context import EngineContext
from services.engines.vllm.config import VllmConfig
from services.engines.vllm.factory import open_vllm
from services.engines.vllm.package import open_vllm_package

ROOT = Path(__file__).resolve().parents[4]


def _is_installed() -> bool:
    """The folder of these tests may be on the path too, as a package without a file."""
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None


absent = pytest.mark.skipif(_is_installed(), reason="vLLM is installed here")


@absent
def test_the_engine_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [each for each in sys.path if not (Path(each) / "vllm" / "conftest.py").is_file()]
    monkeypatch.setattr(sys, "path", others)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
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


@pytest.mark.parametrize("version", ["0.29.9", "0.34.0", "0.34.0rc1", "1.0"])
def test_versions_whose_source_was_not_read_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("vllm")
    package.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    with pytest.raises(ConfigError, match=f"vllm {version} is not supported; 0.30 to 0.33 are"):
        open_vllm_package()


@absent
@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.33.0"])
def test_a_supported_version_that_lacks_a_part_is_refused_in_one_line(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("vllm")
    package.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    with pytest.raises(ConfigError, match="which cannot be imported") as refused:
        open_vllm_package()
    assert "\n" not in refused.value.message
