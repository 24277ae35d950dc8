"""The key `tracing`."""

from pydantic import Field, SecretStr

from rpc.auth.tls import TlsConfig
from runtime.config import Section


class TracingConfig(Section):
    """The key `tracing`. Without an endpoint nothing is recorded, but callers' trace contexts are propagated."""

    endpoint: str = Field(default="", description="host:port of an OTLP/gRPC receiver, such as 127.0.0.1:4317.")
    sample_ratio: float = Field(default=1.0, ge=0, le=1, description="Of traces that begin here; callers decide else.")
    headers: dict[str, SecretStr] = Field(default={}, description="Sent with every export, such as authorization.")
    tls: TlsConfig | None = Field(default=None, description="Unset exports in plain text.")
    export_interval_seconds: float = Field(default=1.0, gt=0)
    export_timeout_seconds: float = Field(default=5.0, gt=0)
    max_queue_spans: int = Field(default=4096, ge=1, description="Spans that wait to be exported; more are dropped.")
    max_batch_spans: int = Field(default=512, ge=1)
    flush_seconds: float = Field(default=3.0, ge=0, description="How long the end of the process waits for exports.")
