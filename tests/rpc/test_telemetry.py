"""Log lines and metrics as an operator's tools read them."""

import json
import logging
from importlib.metadata import version
from typing import Any

import pytest
import structlog
from prometheus_client import Counter
from support.scraping import scrape

from rpc.errors import ConfigError
from rpc.metrics import REGISTRY
from rpc.telemetry import LogFormat, configure_logging, serve_metrics


def lines(captured: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in captured.readouterr().err.splitlines()]


def test_a_line_has_time_level_event_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info", worker_id="w-1", role="prefill")
    structlog.get_logger().info("model loaded", seconds=1.5)
    (line,) = lines(capsys)
    assert line.pop("ts").endswith("Z")
    assert line == {"level": "info", "event": "model loaded", "worker_id": "w-1", "role": "prefill", "seconds": 1.5}


def test_a_line_begins_with_time_level_and_event(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info", worker_id="w-1")
    structlog.get_logger().info("model loaded")
    assert list(lines(capsys)[0]) == ["ts", "level", "event", "worker_id"]


def test_what_is_bound_to_the_context_is_on_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        structlog.get_logger().info("one")
        logging.getLogger("grpc").warning("two")
    assert [line["request_id"] for line in lines(capsys)] == ["r-1", "r-1"]


def test_lines_of_the_standard_library_look_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info", worker_id="w-1")
    logging.getLogger("asyncio").error("slow callback: %d ms", 120)
    (line,) = lines(capsys)
    assert line["event"] == "slow callback: 120 ms"
    assert (line["level"], line["logger"], line["worker_id"]) == ("error", "asyncio", "w-1")


def test_lines_below_the_level_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "warning")
    structlog.get_logger().info("no")
    logging.getLogger("grpc").info("no")
    structlog.get_logger().warning("yes")
    assert [line["event"] for line in lines(capsys)] == ["yes"]


def test_an_exception_is_one_line_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    try:
        raise ValueError("broken")
    except ValueError as error:
        structlog.get_logger().error("failed", exc_info=error)
    (line,) = lines(capsys)
    assert "ValueError: broken" in line["exception"]
    assert "Traceback" in line["exception"]


def test_configuring_again_replaces_the_earlier(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info", worker_id="w-1")
    configure_logging("json", "info", worker_id="w-2")
    structlog.get_logger().info("once")
    assert [line["worker_id"] for line in lines(capsys)] == ["w-2"]


def test_the_console_format_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("console", "info", worker_id="w-1")
    structlog.get_logger().info("model loaded", seconds=1.5)
    text = capsys.readouterr().err
    assert "model loaded" in text
    assert "worker_id=w-1" in text
    assert "{" not in text


def test_metrics_are_served_where_they_are_asked_for() -> None:
    counter = Counter("baton_test_things", "Things of this test.", registry=REGISTRY)
    counter.inc(3)
    with serve_metrics("127.0.0.1:0") as port:
        scraped = scrape(f"127.0.0.1:{port}")
    REGISTRY.unregister(counter)
    assert scraped.sum("baton_test_things_total") == 3
    assert scraped.has("baton_build_info", version=version("baton-serving"))


def test_what_libraries_count_in_their_registry_is_not_served() -> None:
    Counter("some_library_things", "Things of a library.").inc()
    with serve_metrics("127.0.0.1:0") as port:
        scraped = scrape(f"127.0.0.1:{port}")
    assert not scraped.has("some_library_things_total")


def test_every_process_tells_what_it_uses() -> None:
    with serve_metrics("127.0.0.1:0") as port:
        scraped = scrape(f"127.0.0.1:{port}")
    assert scraped.sum("process_resident_memory_bytes") > 10e6
    assert scraped.sum("process_cpu_seconds_total") > 0


def test_metrics_stop_with_their_context() -> None:
    with serve_metrics("127.0.0.1:0") as port:
        pass
    with serve_metrics(f"127.0.0.1:{port}") as again:
        assert again == port


def test_an_empty_address_serves_no_metrics() -> None:
    with serve_metrics("") as port:
        assert port == 0


def test_a_taken_port_of_metrics_is_a_config_error() -> None:
    with serve_metrics("127.0.0.1:0") as port:
        again = serve_metrics(f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=f"metrics_listen.*{port}"):
            again.__enter__()


@pytest.mark.parametrize("listen", ["localhost", "127.0.0.1:http", "127.0.0.1:99999"])
def test_an_address_of_metrics_that_is_none_is_a_config_error(listen: str) -> None:
    with pytest.raises(ConfigError, match=f"metrics_listen.*{listen}"), serve_metrics(listen):
        pass


@pytest.mark.parametrize("format", ["json", "console"])
def test_a_traceback_shows_no_values_of_variables(capsys: pytest.CaptureFixture[str], format: LogFormat) -> None:
    configure_logging(format, "info")
    try:
        prompt = "-".join(["own", "words"])
        int(prompt)
    except ValueError:
        structlog.get_logger().exception("failed")
    logged = capsys.readouterr().err
    assert "Traceback" in logged
    assert logged.count("own-words") == 1  # in int's message alone
