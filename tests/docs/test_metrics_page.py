"""docs/metrics.md has a row for every metric, and none for another."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

import router.processes.process
import router.telemetry.metrics
import runtime.telemetry.metrics
import services.engines.running.metrics
import services.engines.sglang.metrics
import services.engines.trtllm.monitoring.metrics
import services.engines.vllm.monitoring.metrics
import services.telemetry.metrics
from runtime.telemetry.frequent_metrics import FrequentCounter, FrequentHistogram
from runtime.telemetry.metrics import REGISTRY
from services.telemetry.gpu import GpuCollector

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()


@dataclass(frozen=True)
class Row:
    name: str
    type: str
    labels: tuple[str, ...]
    meaning: str


def rows() -> list[Row]:
    found = re.findall(r"^\| `(baton_\w+)` \| (\w+) \| (.*?) ?\| (.*?) \|$", PAGE, re.M)
    return [Row(name, kind, tuple(re.findall(r"`(\w+)`", labels)), meaning) for name, kind, labels, meaning in found]


def shown_name(family: Metric) -> str:
    """The names of a metric as it is served, and as queries have it."""
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def families() -> dict[str, Metric]:
    # There need not be a GPU.
    found = [*REGISTRY.collect(), *GpuCollector({}).collect()]
    return {shown_name(each): each for each in found if each.name.startswith("baton_")}


MODULES = (
    router.processes.process,
    router.telemetry.metrics,
    services.engines.running.metrics,
    services.telemetry.metrics,
    services.engines.sglang.metrics,
    services.engines.trtllm.monitoring.metrics,
    services.engines.vllm.monitoring.metrics,
    runtime.telemetry.metrics,
)
ROWS = {row.name: row for row in rows()}


def test_every_metric_has_a_row_and_every_row_a_metric() -> None:
    assert set(ROWS) == set(families())


def test_no_metric_comes_twice() -> None:
    assert len(rows()) == len(ROWS)


@pytest.mark.parametrize("name", list(ROWS))
def test_a_row_has_the_type_of_its_metric(name: str) -> None:
    assert ROWS[name].type == families()[name].type.replace("info", "gauge")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_row_has_the_labels_of_its_metric(module: ModuleType) -> None:
    metrics = [
        each
        for each in vars(module).values()
        if isinstance(each, (MetricWrapperBase, FrequentCounter, FrequentHistogram))
    ]
    assert metrics
    for metric in metrics:
        (family,) = metric.describe()
        if family.type != "info":
            assert ROWS[shown_name(family)].labels == tuple(metric._labelnames), family.name


def test_every_label_is_explained() -> None:
    explained = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, re.M))))
    used = {label for row in ROWS.values() for label in row.labels}
    assert used - explained - {"worker_id", "roles", "engine", "version", "sent", "when"} == set()


def test_names_say_their_units() -> None:
    for name, family in families().items():
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_ratio"))
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent)\b", name)


@pytest.mark.parametrize(
    ("package", "zeros"),
    [
        (
            "router",
            [
                *(f'baton_router_retries_total{{stage="{stage}"}}' for stage in ("encode", "prefill", "decode")),
                *(f'baton_router_migrations_total{{stage="{stage}"}}' for stage in ("prefill", "decode")),
                *(
                    f'baton_router_refusals_total{{reason="{reason}"}}'
                    for reason in ("OVERLOADED", "QUOTA_EXCEEDED", "DEADLINE_UNREACHABLE")
                ),
                'baton_embedding_cache_evictions_total{reason="full"}',
                'baton_router_workers{state="ready",worker_role="decode"}',
            ],
        ),
        ("services", ["baton_handoff_lease_expiries_total", "baton_handoff_confirmations_refused_total"]),
    ],
)
def test_what_has_never_happened_is_zero_and_not_unknown(package: str, zeros: list[str]) -> None:
    script = (
        f"import {package}.telemetry.metrics, prometheus_client as p; "
        "from runtime.telemetry.metrics import REGISTRY as r; print(p.generate_latest(r).decode())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert [zero for zero in zeros if f"{zero} 0.0" not in done.stdout.splitlines()] == []
