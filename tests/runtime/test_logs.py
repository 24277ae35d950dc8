"""Log lines and metrics, as an operator's tools read them."""

import asyncio
import json
import logging
from contextvars import copy_context
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import structlog

from runtime.telemetry.logs import FrequentLogger, LogFormat, add_log_fields, configure_logging, log_fields


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


def test_the_fields_of_a_task_are_on_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")

    def write() -> None:
        add_log_fields(request_id="r-1")
        structlog.get_logger().info("one")
        logging.getLogger("grpc").warning("two")

    copy_context().run(write)
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


async def test_the_fields_of_one_task_are_on_no_line_of_another() -> None:
    async def add(name: str) -> dict[str, object]:
        add_log_fields(request_id=name)
        await asyncio.sleep(0)
        return dict(log_fields())

    found = await asyncio.gather(add("r-1"), add("r-2"))
    assert [fields["request_id"] for fields in found] == ["r-1", "r-2"]
    assert "request_id" not in log_fields()


def test_a_logger_for_frequent_lines_follows_a_new_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    logger = FrequentLogger("calls")
    for worker in ("w-1", "w-2"):
        configure_logging("json", "info", worker_id=worker)
        logger.bound().info("call ended")
    configure_logging("json", "warning")
    logger.bound().info("no")
    assert [line["worker_id"] for line in lines(capsys)] == ["w-1", "w-2"]


def test_a_value_that_json_does_not_have_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    structlog.get_logger().info("model loaded", device=object)
    assert lines(capsys)[0]["device"] == repr(object)


def test_a_line_has_the_time_now_in_utc(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    structlog.get_logger().info("model loaded")
    logged = datetime.fromisoformat(lines(capsys)[0]["ts"].replace("Z", "+00:00"))
    # Clocks may be set while tests run.
    assert abs(datetime.now(timezone.utc) - logged) < timedelta(minutes=10)
