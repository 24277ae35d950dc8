"""Structured logs on stderr, and the fields that every line of a call has."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from runtime.clock import wall_time_ns
from runtime.config import Section

LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

# One variable for all fields: structlog has one for each, and looks at all variables of a context for each line.
_FIELDS: ContextVar[Mapping[str, object]] = ContextVar("log_fields", default={})  # noqa: B039  # never changed in place


class LogConfig(Section):
    """The key `log`."""

    format: LogFormat = "json"
    level: LogLevel = "info"


def configure_logging(format: LogFormat, level: LogLevel, **static_fields: str) -> None:
    """Sends structlog's and the standard library's logs to stderr, one line an event.

    Every line has ts (UTC, ISO 8601), level, event, the static fields (such as worker_id and role), and the fields
    of `add_log_fields` (such as request_id). Called once, at start; a later call replaces it.
    """
    shared = _shared_processors(static_fields)
    renderers = _renderers(format)
    # Written directly: through the standard library a line costs about four times as much.
    structlog.configure(
        processors=[*shared, *renderers],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)


def add_log_fields(**fields: object) -> None:
    """Adds fields to every line of this task, and of those that it starts from now on."""
    _FIELDS.set({**_FIELDS.get(), **fields})


log_fields: Final = _FIELDS.get
"""The fields of this task's lines."""


def set_log_fields(fields: Mapping[str, object]) -> None:
    """Replaces the fields of this task's lines."""
    _FIELDS.set(fields)


class FrequentLogger:
    """A structlog logger for a line of each request: structlog's own is put together anew for each line."""

    def __init__(self, name: str) -> None:
        self._logger = structlog.get_logger(name)
        self._bound: Any = None
        self._configured: tuple[object, ...] = ()

    def bound(self) -> Any:
        """The logger, as logging is configured now."""
        config = structlog.get_config()
        configured = (config["processors"], config["wrapper_class"], config["logger_factory"])
        if configured != self._configured:
            self._bound, self._configured = self._logger.bind(), configured
        return self._bound


def _shared_processors(static_fields: dict[str, str]) -> list[Processor]:
    stamp = _Clock()

    # One processor, and not one for each field: every request has a line.
    def complete(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        level = "warning" if method == "warn" else "error" if method == "exception" else method
        line = {"ts": "", "level": "", "event": "", **static_fields, **_FIELDS.get(), **event}
        line["ts"], line["level"] = stamp.now(), level
        return line

    return [complete]


class _Clock:
    """Times of lines, in UTC. What is the same for all lines of a second is made once."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def now(self) -> str:
        """The time now, in ISO 8601."""
        microseconds = wall_time_ns() // 1000
        second = microseconds // 1_000_000
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._text}.{microseconds % 1_000_000:06d}Z"


def _renderers(format: LogFormat) -> list[Processor]:
    if format == "console":
        # The other formatters show local variables, prompts and secrets among them.
        plain = structlog.dev.plain_traceback
        return [
            structlog.dev.ConsoleRenderer(timestamp_key="ts", colors=sys.stderr.isatty(), exception_formatter=plain)
        ]
    return [_to_json]


def _to_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    # What has no JSON is left to structlog; an encoder with its function would have to be made for each line.
    try:
        return _ENCODER.encode(event)
    except TypeError:
        return str(_RENDERER(logger, method, event))


_ENCODER = json.JSONEncoder()
_RENDERER = structlog.processors.JSONRenderer()
