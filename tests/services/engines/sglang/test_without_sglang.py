"""Nothing of SGLang is imported where it is not installed, and its engine is refused in one line."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import ConfigError
from services.engines.context import EngineContext
from services.engines.sglang.config import SglangConfig
from services.engines.sglang.factory import check, open_sglang, resolve

ROOT = Path(__file__).resolve().parents[4]


def _is_installed() -> bool:
    """The folder of these tests may be on the path too, as a package without a file."""
    found = importlib.util.find_spec("sglang")
    return found is not None and found.origin is not None


@pytest.mark.skipif(_is_installed(), reason="SGLang is installed here")
def test_the_engine_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [each for each in sys.path if not (Path(each) / "sglang" / "conftest.py").is_file()]
    monkeypatch.setattr(sys, "path", others)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    with pytest.raises(ConfigError, match=r"docs/sglang\.md") as refused:
        open_sglang(SglangConfig(model=Path("some/folder")), EngineContext(roles=("decode",)))
    assert "\n" not in refused.value.message


def test_importing_the_engine_imports_no_sglang() -> None:
    code = "import sys, services.engines.sglang.engine; print('sglang' in sys.modules, 'zmq' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("settings", "roles", "fault"),
    [
        ({}, ("prefill", "decode"), "an engine each"),
        ({"whole_requests": True}, ("prefill",), "whole_requests"),
        ({"handoff": {"seconds": 5}}, ("decode",), "lease_seconds"),
        ({"args": {"dtype": "float32"}}, ("decode",), "float32"),
        ({"args": {"device": "cpu"}}, ("decode",), "enable_deterministic_inference"),
    ],
    ids=["both roles", "whole requests", "lease", "float32", "seeds on CPUs"],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], roles: tuple[str, ...], fault: str) -> None:
    config = SglangConfig.model_validate({"model": "some/folder", **settings})
    with pytest.raises(ConfigError, match=fault):
        check(config, resolve(config), roles, 10.0)
