"""Span export over OTLP, with one log line when it starts to fail and one when it works again."""

import logging
import threading
from collections.abc import Sequence

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from rpc.tracing.config import TracingConfig
from rpc.tracing.otlp import InPlaceExporter

log = structlog.get_logger(__name__)

# These loggers report every attempt, retry and dropped span: thousands of lines while a receiver is away.
_NOISY = ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal")


class QuietExporter(SpanExporter):
    """An exporter that logs when its receiver is lost and found again. Called by one thread at a time."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._lost = 0
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends spans. Those that cannot be sent are dropped, and counted."""
        result = self._exporter.export(spans)
        with self._lock:
            if result is SpanExportResult.SUCCESS:
                self._record_success()
            else:
                self._record_failure(len(spans))
        return result

    def shutdown(self, timeout_millis: float = 3_000) -> None:
        """Stops; spans that are not sent yet are lost."""
        if isinstance(self._exporter, OTLPSpanExporter):
            self._exporter.shutdown(timeout_millis=timeout_millis)
        else:
            self._exporter.shutdown()

    def _record_success(self) -> None:
        if self._lost:
            log.info("spans are exported again", endpoint=self._endpoint, lost=self._lost)
        self._lost = 0

    def _record_failure(self, count: int) -> None:
        if not self._lost:
            log.warning("spans cannot be exported", endpoint=self._endpoint)
        self._lost += count


def silence_library_logs() -> None:
    """Silences the exporter's own loggers; QuietExporter logs a failure once."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def open_exporter(config: TracingConfig) -> QuietExporter:
    """An exporter to `config.endpoint`. Connects when first used. Raises ConfigError if TLS files cannot be read."""
    silence_library_logs()
    headers = [(key.lower(), value.get_secret_value()) for key, value in config.headers.items()]
    exporter = InPlaceExporter(
        # With a scheme, so that neither the library nor an environment variable guesses one.
        endpoint=f"{'https' if config.tls else 'http'}://{config.endpoint}",
        insecure=config.tls is None,
        credentials=config.tls.channel_credentials() if config.tls else None,
        headers=headers,
        timeout=config.export_timeout_seconds,
    )
    return QuietExporter(exporter, config.endpoint)
