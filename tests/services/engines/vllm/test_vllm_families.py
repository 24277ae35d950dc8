"""vLLM's own families beside ours, in one scrape."""

from collections import Counter as Count

from prometheus_client import REGISTRY as LIBRARY_REGISTRY
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import services.engines.vllm.monitoring.metrics  # noqa: F401 - it registers ours
from runtime.telemetry.metrics import REGISTRY
from services.engines.external.families import PackageFamilies


def test_one_scrape_has_ours_and_vllms_families_and_each_series_once() -> None:
    """vLLM registers its families with Prometheus' global registry, as this test does."""
    theirs = [
        Counter("vllm:prompt_tokens", "Tokens.", ["model_name", "engine"]),
        Gauge("vllm:num_requests_running", "Requests.", ["model_name", "engine"]),
        Histogram("vllm:time_to_first_token_seconds", "TTFT.", ["model_name", "engine"]),
        Gauge("other_libraries_gauge", "Not served."),
    ]
    try:
        for metric in theirs[:3]:
            metric.labels("m", "0")
        with PackageFamilies("vllm:"):
            text = generate_latest(REGISTRY).decode()
        after = generate_latest(REGISTRY).decode()
    finally:
        for metric in theirs:
            LIBRARY_REGISTRY.unregister(metric)
    series = Count(
        (one.name, tuple(sorted(one.labels.items())))
        for family in text_string_to_metric_families(text)
        for one in family.samples
    )
    assert {name: number for name, number in series.items() if number > 1} == {}
    labels = (("engine", "0"), ("model_name", "m"))
    assert ("vllm:prompt_tokens_total", labels) in series
    assert ("vllm:num_requests_running", labels) in series
    assert ("vllm:time_to_first_token_seconds_count", labels) in series
    assert any(name == "baton_vllm_handoffs_held" for name, _ in series)
    assert not any(name.startswith("other_libraries") for name, _ in series)
    families = Count(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))
    assert max(families.values()) == 1
    assert "vllm:" not in after
