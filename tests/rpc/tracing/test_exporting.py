"""Exporting spans: what is sent, and the cost of a missing receiver."""

import asyncio
import json
import time

import pytest
from opentelemetry.trace import SpanKind
from pydantic import ValidationError
from structlog.testing import capture_logs
from support.eventually import eventually
from support.servers.otlp import viewing

from baton.errors import ConfigError
from cli.local.ports import free_port
from rpc.tracing.exporter import TracingConfig
from rpc.tracing.span import NO_SPAN
from rpc.tracing.tracer import configure_tracing
from runtime.config import load


def without_receiver(**settings: object) -> TracingConfig:
    """An endpoint where nothing listens."""
    quick = {"export_interval_seconds": 0.02, "export_timeout_seconds": 0.1, "flush_seconds": 0.5, **settings}
    return TracingConfig(endpoint=f"127.0.0.1:{free_port()}", **quick)  # type: ignore[arg-type]


async def test_the_end_of_a_process_sends_what_is_left() -> None:
    async with viewing() as viewer:
        async with configure_tracing(TracingConfig(endpoint=viewer.otlp_address), "baton-test", "i-1") as tracer:
            tracer.begin("work", None).end()
        await eventually(lambda: len(viewer.store) == 1)
        assert viewer.store.services == ["baton-test"]


async def test_without_an_endpoint_nothing_is_begun() -> None:
    async with configure_tracing(TracingConfig(), "baton-test") as tracer:
        assert not tracer.is_on
        assert tracer.begin("work", None) is NO_SPAN


async def test_no_receiver_delays_the_end_no_longer_than_the_bound() -> None:
    started = time.monotonic()
    async with configure_tracing(without_receiver(export_timeout_seconds=20.0), "baton-test") as tracer:
        tracer.begin("work", None).end()
    assert time.monotonic() - started < 10


async def test_a_receiver_that_is_away_is_one_line_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with capture_logs() as lines:
        async with configure_tracing(without_receiver(max_queue_spans=4), "baton-test") as tracer:
            for _ in range(20):
                tracer.begin("work", None, SpanKind.INTERNAL).end()
                await asyncio.sleep(0.05)
    assert [line["event"] for line in lines] == ["spans cannot be exported"]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_second_end_and_a_late_attribute_are_harmless(caplog: pytest.LogCaptureFixture) -> None:
    async with configure_tracing(without_receiver(flush_seconds=0.0), "baton-test") as tracer:
        span = tracer.begin("work", None)
        span.end()
        span.end()
    assert not caplog.records


@pytest.mark.parametrize("endpoint", ["collector", "http://collector:4317", "collector:0", ":4317", "a/b:1"])
async def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        async with configure_tracing(TracingConfig(endpoint=endpoint), "baton-test"):
            pass


def test_a_ratio_is_between_nothing_and_everything() -> None:
    with pytest.raises(ValidationError):
        TracingConfig(sample_ratio=1.5)


def test_headers_are_never_shown(tmp_path) -> None:
    path = tmp_path / "tracing.yaml"
    path.write_text(json.dumps({"headers": {"authorization": "Bearer secret"}}))
    assert "secret" not in "\n".join(load(TracingConfig, path).describe())
