"""Structured logs on stderr, and the fields that every line of a call has."""

import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

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


def log_fields() -> Mapping[str, object]:
    """The fields of this task's lines."""
    return _FIELDS.get()


def set_log_fields(fields: Mapping[str, object]) -> None:
    """Replaces the fields of this task's lines."""
    _FIELDS.set(fields)


def merge_log_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """structlog's processor that adds the task's fields to a line."""
    return {**event, **{name: value for name, value in _FIELDS.get().items() if name not in event}}


def _shared_processors(static_fields: dict[str, str]) -> list[Processor]:
    def add_static_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {**static_fields, **event}

    return [
        merge_log_fields,
        add_static_fields,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]


def _renderers(format: LogFormat) -> list[Processor]:
    if format == "console":
        # The other formatters show local variables, prompts and secrets among them.
        plain = structlog.dev.plain_traceback
        return [
            structlog.dev.ConsoleRenderer(timestamp_key="ts", colors=sys.stderr.isatty(), exception_formatter=plain)
        ]
    return [
        structlog.processors.format_exc_info,
        _put_first,
        structlog.processors.JSONRenderer(),
    ]


def _put_first(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {"ts": event["ts"], "level": event["level"], "event": event["event"], **event}
