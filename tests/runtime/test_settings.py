"""--help of a router and of a worker: every setting once, from the typed configuration."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field
from support.cluster.processes import ROOT

from router.config import RouterConfig
from runtime.config import Section, Variables, load
from runtime.settings import describe, groups
from services.config import WorkerConfig
from services.engines.registry import ENGINES


class Limits(Section):
    wait_seconds: float = Field(default=2.5, gt=0)  # for an answer
    sizes: tuple[int, ...] = (1, 2)


class Example(Section):
    name: str = Field(description="In logs.")
    limits: Limits = Limits(sizes=(3,))
    more: Limits | None = None


def test_a_setting_has_its_type_bounds_unit_default_sentence_and_variable() -> None:
    said = describe(Example, Variables("BATON_X__", {})).splitlines()
    assert said[3:6] == ["  name: text (default: required)", "      BATON_X__NAME", "      In logs."]
    wait = said.index("  limits.wait_seconds: number, > 0, seconds (default: 2.5)")
    assert said[wait + 1 : wait + 3] == ["      BATON_X__LIMITS__WAIT_SECONDS", "      For an answer."]
    assert "  limits.sizes: list of whole number (default: [3])" in said
    assert "  more.sizes: list of whole number (default: [1,2])" in said


def settings_of(package: str) -> list[str]:
    command = [sys.executable, "-m", package, "--help"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return re.findall(r"^  ([a-z0-9_.]+)(?: \(.*\))?: .* \(default: .*\)$", ended.stdout, re.MULTILINE)


@pytest.mark.parametrize("package", ["router", "services"])
def test_help_lists_every_effective_setting_once(package: str) -> None:
    listed = Counter(settings_of(package))
    assert [key for key, count in listed.items() if count > 1] == []
    model: Any = {"router": RouterConfig, "services": WorkerConfig}[package]
    file = ROOT / "deploy" / "config" / {"router": "router.yaml", "services": "worker.yaml"}[package]
    # Optional sections are one line of --print-config if they are not set.
    printed = {key for key in load(model, file).sources if not any(each.startswith(f"{key}.") for each in listed)}
    assert printed - set(listed) == set()


def test_the_settings_of_every_kind_of_engine_are_listed() -> None:
    found = {setting.key: setting for group in groups(WorkerConfig) for setting in group.settings}
    assert set(found["engine.kind"].of) >= set(ENGINES)
    assert found["engine.decode_step_seconds"].of == ("simulated",)


@pytest.mark.parametrize("package", ["router", "services"])
def test_a_process_reads_its_variables_and_refuses_unknown_ones(package: str, tmp_path: Path) -> None:
    prefix = {"router": "BATON_ROUTER__", "services": "BATON_WORKER__"}[package]
    file = tmp_path / "config.yaml"
    file.write_text("log: {level: debug}")
    others = {
        "BATON_ADDRESS": "a:1",
        "BATON_ROUTER_PORT": "tcp://10.0.0.1:7070",
        "BATON_ROUTER_SERVICE_HOST": "10.0.0.1",
    }
    environment = {**os.environ, **others, f"{prefix}LOG__LEVEL": "error", f"{prefix}NAMESPACE": "blue"}
    command = [sys.executable, "-m", package, str(file), "namespace=green", "--print-config"]

    def run(**more: str) -> "subprocess.CompletedProcess[str]":
        variables = {**environment, **more}
        return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)

    ended = run()
    assert ended.returncode == 0
    assert 'log.level = "error"  # environment' in ended.stdout
    assert 'namespace = "green"  # override' in ended.stdout
    wrong = run(**{f"{prefix}LOG__LEVLE": "error"})
    assert wrong.returncode == 2
    assert wrong.stderr.strip() == f"{prefix}LOG__LEVLE: log.levle: unknown key (did you mean 'level'?)"
