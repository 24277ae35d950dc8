"""The router's configuration, as deploy/config/router.yaml holds it."""

import secrets

from pydantic import Field

from discovery.config import RegistryConfig
from media.config import MediaConfig
from rpc.access import AuthConfig
from rpc.config import Section
from rpc.serve import ConnectionLimits
from rpc.telemetry import LogFormat, LogLevel
from rpc.tls import TlsConfig, TlsSection
from rpc.tracing.config import TracingConfig


class LogConfig(Section):
    """How log lines look and which are written."""

    format: LogFormat = "console"
    level: LogLevel = "info"


class LimitsConfig(Section):
    """What one request may ask, whatever the model. Texts are counted in characters."""

    request_timeout_seconds: float = Field(default=600.0, gt=0)  # for clients that set no deadline
    max_stop_strings: int = Field(default=16, ge=0)
    max_stop_string_length: int = Field(default=256, ge=1)
    max_waiting_tokens: int = Field(
        default=1024, ge=1
    )  # unread by a slow client, before its decode stream is read no further
    slow_reader_seconds: float = Field(default=60.0, gt=0)  # without reading anything, before its request is ended
    max_images: int = Field(default=16, ge=0)  # of one request
    max_loading_images: int = Field(default=16, ge=1)  # fetched and checked at the same time, of all requests


class AdmissionConfig(Section):
    """Which requests are let in to the workers, and when."""

    max_running_per_worker: int = Field(default=0, ge=0)  # for each that decodes; more wait here; 0 lets all in
    max_waiting: int = Field(default=1024, ge=0)  # of one model
    predict_deadlines: bool = True  # refuse what cannot be done in the time that its caller gives it


class QuotaConfig(Section):
    """What one tenant may use. 0 is no limit."""

    requests_per_second: float = Field(default=0.0, ge=0)
    tokens_per_second: float = Field(default=0.0, ge=0)  # of prompts and answers
    burst_seconds: float = Field(default=10.0, gt=0)  # so many seconds' worth may be used at once
    concurrent: int = Field(default=0, ge=0)  # requests that run or wait


class QuotasConfig(Section):
    """What tenants may use: those that are named, and each of the others."""

    default: QuotaConfig = QuotaConfig()
    tenants: dict[str, QuotaConfig] = Field(default_factory=dict)


class RetryConfig(Section):
    """How often a request is run again after a worker has failed it."""

    max_attempts: int = Field(default=3, ge=1)  # of each of prefill and decode, the first one included
    budget_ratio: float = Field(default=0.1, ge=0)  # retries that each request earns for all
    budget_floor: int = Field(default=32, ge=1)  # retries to start with, and the least that come back with time
    wait_seconds: float = Field(default=5.0, ge=0)  # for a worker that a begun answer can go on at, where there is none


class RoutingConfig(Section):
    """Where requests run."""

    local_prefill_tokens: int = Field(default=0, ge=0)  # a shorter prompt runs whole on its decode worker; 0 is off
    session_slack: float = Field(default=8.0, ge=0)  # how much busier, in requests, a session's own worker may be
    inline_encode: bool = True  # without an encode worker, images go to one that encodes beside prefill or decode


class EmbeddingsConfig(Section):
    """What the router keeps of images that were encoded."""

    max_bytes: int = Field(default=256 * 2**20, ge=0)  # of all embeddings, wherever they are; 0 keeps none
    leased_idle_seconds: float = Field(default=60.0, gt=0)  # then one that lies on an encode worker is given back


class ProbeConfig(Section):
    """How the router convinces itself that a worker is there."""

    interval_seconds: float = Field(default=1.0, gt=0)
    timeout_seconds: float = Field(default=1.0, gt=0)
    hung_seconds: float = Field(default=3.0, gt=0)  # without any answer; then what runs there goes on elsewhere


class RouterConfig(Section):
    """Everything that can be set for `python -m router`."""

    namespace: str = "default"
    router_id: str = Field(default="", description="On its log lines and spans; generated if empty.")
    listen: str = "127.0.0.1:7070"
    tls: TlsSection = TlsSection()  # with a `ca` to listen with, callers need certificates
    auth: AuthConfig = AuthConfig()
    connections: ConnectionLimits = ConnectionLimits()
    metrics_listen: str = ""  # host:port; without a host 127.0.0.1; empty serves and measures nothing
    metrics_tls: TlsConfig | None = None
    announce_seconds: float = Field(
        default=0.0, ge=0, description="After SIGTERM, NOT_SERVING but taking requests, until balancers have heard."
    )
    drain_seconds: float = Field(default=30.0, ge=0)
    allow_faults: bool = False  # whether x-baton-fault is passed on to workers: in tests only
    registry: RegistryConfig = RegistryConfig()
    log: LogConfig = LogConfig()
    limits: LimitsConfig = LimitsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    quotas: QuotasConfig = QuotasConfig()
    retry: RetryConfig = RetryConfig()
    routing: RoutingConfig = RoutingConfig()
    probe: ProbeConfig = ProbeConfig()
    tracing: TracingConfig = TracingConfig()
    media: MediaConfig = MediaConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()

    def named(self) -> "RouterConfig":
        """The same, with an id."""
        return self.model_copy(update={"router_id": self.router_id or f"router-{secrets.token_hex(4)}"})
