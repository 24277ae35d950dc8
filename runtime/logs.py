"""Structured logs on stderr."""

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from runtime.config import Section

LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


class LogConfig(Section):
    """The key `log`."""

    format: LogFormat = "json"
    level: LogLevel = "info"


def configure_logging(format: LogFormat, level: LogLevel, **static_fields: str) -> None:
    """Sends structlog's and the standard library's logs to stderr, one line an event.

    Every line has ts (UTC, ISO 8601), level, event, the static fields (such as worker_id and role), and the fields
    bound to structlog's context variables (such as request_id). Called once, at start; a later call replaces it.
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


def _shared_processors(static_fields: dict[str, str]) -> list[Processor]:
    def add_static_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {**static_fields, **event}

    return [
        structlog.contextvars.merge_contextvars,
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
