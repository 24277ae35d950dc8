"""The alert rules: each fires when it should, queries existing metrics, and says what to do."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.manifests import DEPLOY, ROOT
from support.servers.promtool import promtool

PROMETHEUS = DEPLOY / "prometheus"
RULES = PROMETHEUS / "rules" / "baton.yaml"
TESTS = PROMETHEUS / "tests" / "baton.yaml"
PAGE = (ROOT / "docs" / "alerts.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=\n## |\Z)", PAGE, re.M | re.S))


def alerts() -> list[Any]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def names() -> list[str]:
    return [alert["alert"] for alert in alerts()]


def test_the_rules_are_rules() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", str(RULES))


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    promtool("test", "rules", str(TESTS))


def test_every_alert_is_tested_both_ways() -> None:
    tested = [test["name"] for test in yaml.safe_load(TESTS.read_text())["tests"]]
    assert sorted(tested) == sorted(f"{name} {how}" for name in names() for how in ("fires", "stays quiet"))


def test_prometheus_loads_the_rules_from_where_they_are_mounted() -> None:
    promtool("check", "config", "--syntax-only", str(PROMETHEUS / "prometheus.yml"))
    (pattern,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["rule_files"]
    mounts = yaml.safe_load((DEPLOY / "compose" / "platform.yaml").read_text())["services"]["prometheus"]["volumes"]
    assert f"../prometheus/rules:{Path(pattern).parent}:ro" in mounts
    assert RULES.match(Path(pattern).name)


def test_no_alert_comes_twice() -> None:
    assert len(set(names())) == len(names())


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    assert set(SECTIONS) == set(names())


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_leads_to_its_section(alert: Any) -> None:
    assert alert["annotations"]["runbook"] == f"docs/alerts.md#{alert['alert'].lower()}"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_how_urgent_it_is(alert: Any) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning")


@pytest.mark.parametrize("name", list(SECTIONS))
def test_a_section_says_what_to_do(name: str) -> None:
    steps = [line for line in SECTIONS[name].splitlines() if line.startswith("* ")]
    assert len(steps) >= 2
