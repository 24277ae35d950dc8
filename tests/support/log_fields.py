"""A processor of structlog for captured lines."""

from structlog.typing import EventDict, WrappedLogger

from runtime.telemetry.logs import log_fields


def merge_log_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Adds the task's fields to a line, as the configured logging does."""
    return {**log_fields(), **event}
