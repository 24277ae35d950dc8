"""The router's configuration. deploy/config/router.yaml is an example with the defaults."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from discovery.config import RegistryConfig
from discovery.record import Domain
from media.config import MediaConfig
from rpc.auth.access import AuthConfig
from rpc.auth.tls import TlsConfig, TlsSection
from rpc.server import ConnectionLimits, ServerKind, default_server
from rpc.tracing.exporter import TracingConfig
from runtime.config import Section
from runtime.entropy import token_hex
from runtime.telemetry.logs import LogConfig

Fairness = Literal["weighted", "strict", "none"]

_MOST_RATE = 2.0**40  # of a quota: what one router tells another has to be smaller than 2**50
_LONGEST_BURST_SECONDS = 86_400.0


class LimitsConfig(Section):
    """Limits of one request, for all models. Lengths of texts are in characters."""

    request_timeout_seconds: float = Field(default=600.0, gt=0)  # for clients that set no deadline
    max_timeout_seconds: float = Field(default=3600.0, gt=0)  # for clients whose deadline is later
    max_keep_seconds: float = Field(default=60.0, ge=0)  # an answer goes on without its client; 0 keeps none
    max_retain_seconds: float = Field(default=3600.0, gt=0)  # a request's prefix stays in caches if it asks for longer
    max_messages: int = Field(default=4096, ge=1)  # of a chat
    max_message_parts: int = Field(default=8192, ge=1)  # of all its messages
    max_tools: int = Field(default=128, ge=0)  # of a chat
    max_logit_biases: int = Field(default=1024, ge=0)
    max_bad_words: int = Field(default=64, ge=0)
    max_bad_word_length: int = Field(default=256, ge=1)
    max_stop_token_ids: int = Field(default=1024, ge=0)
    max_stop_strings: int = Field(default=16, ge=0)
    max_stop_string_length: int = Field(default=256, ge=1)
    max_answers: int = Field(default=16, ge=1)  # of one request
    max_waiting_tokens: int = Field(default=1024, ge=1)  # unread by a slow client, before its decode stream is paused
    slow_reader_seconds: float = Field(default=60.0, gt=0)  # without reading anything, before its request is stopped
    max_tokenizing: int = Field(default=64, ge=1)  # calls of Tokenize and Detokenize at the same time
    grammar_seconds: float = Field(default=10.0, gt=0)  # to check the grammar of a guided request
    max_images: int = Field(default=16, ge=0)  # of one request
    max_embed_inputs: int = Field(default=2048, ge=1)  # of one request for embeddings
    max_embed_numbers: int = Field(default=2**21, ge=1)  # of all its vectors: 8 MiB, or about 40 MB as JSON
    max_loading_images: int = Field(default=16, ge=1)  # fetched and checked at the same time, of all requests


class AdmissionConfig(Section):
    """The limits on requests that run on workers."""

    max_running_per_worker: int = Field(default=0, ge=0)  # for each decode or embed worker; 0 is no limit
    max_waiting: int = Field(default=1024, ge=0)  # of one model
    outage_seconds: float = Field(default=10.0, ge=0)  # how long they wait while no decode worker is ready
    predict_deadlines: bool = True  # refuse requests that cannot meet their deadline
    fairness: Fairness | None = Field(
        default=None,
        description="Of waiting requests: `weighted` by tenants' work, `strict` priorities and tenants within each, or"
        " `none`, priorities alone. Unset: weighted if callers are authenticated or have quotas, else none.",
    )
    unauthenticated_tenants: int = Field(
        default=256,
        ge=1,
        le=10_000,
        description="Names without authentication that have an account each; further ones share one.",
    )


class QuotaConfig(Section):
    """The quota of one tenant. 0 is no limit."""

    requests_per_second: float = Field(default=0.0, ge=0, le=_MOST_RATE)
    tokens_per_second: float = Field(default=0.0, ge=0, le=_MOST_RATE)  # of prompts and completions
    burst_seconds: float = Field(default=10.0, gt=0, le=_LONGEST_BURST_SECONDS)  # the burst, as seconds of the rates
    concurrent: int = Field(default=0, ge=0)  # running and waiting requests


# As requests name them: another name would be no tenant's.
TenantName: TypeAlias = Annotated[str, Field(max_length=128, pattern=r"^[ -~]*$")]


class QuotasConfig(Section):
    """The quotas of named tenants, and the default for each other tenant."""

    default: QuotaConfig = QuotaConfig()
    tenants: dict[TenantName, QuotaConfig] = Field(default_factory=dict)
    unreachable: Literal["refuse", "allow"] = Field(
        default="refuse", description="What to do when no router has lent a tenant's quota for longer."
    )
    unreachable_seconds: float = Field(
        default=15.0, ge=0, description="Until then requests are refused: more than the registry's lease."
    )

    @property
    def are_none(self) -> bool:
        """True if no tenant has a limit."""
        return not self.tenants and self.default == QuotaConfig()


class PeersConfig(Section):
    """The calls between the routers of a namespace, which share quotas and places. docs/tenancy.md."""

    listen: str = Field(default="", description="host:port for other routers; if empty, for those of this host alone.")
    advertise: str = Field(default="", description="Where they reach it; what it really listens on if empty.")
    enabled: bool = Field(default=True, description="Whether quotas and limits are of all routers; else of each one.")
    timeout_seconds: float = Field(default=0.5, gt=0)  # of a call to another router


class RetryConfig(Section):
    """Retries after a worker has failed a request."""

    max_attempts: int = Field(default=3, ge=1)  # of each stage, including the first
    budget_ratio: float = Field(default=0.1, ge=0)  # of a retry that each request adds to the budget of all
    budget_floor: int = Field(default=32, ge=1)  # retries at the start, and after a while without any
    wait_seconds: float = Field(default=5.0, ge=0)  # for a decode worker that can continue an answer
    reattach_seconds: float = Field(
        default=4.0,
        ge=0,
        description="For the next process of a worker that keeps its KV, which goes on with its answers, before another"
        " one computes them again.",
    )
    answer_seconds: float = Field(
        default=10.0, gt=0, description="For an idle worker to answer, more for a busy one; then another one is asked."
    )
    silence_seconds: float = Field(
        default=60.0,
        ge=0,
        description="Without a token of an answer, on a worker where no request waits, before another one continues it;"
        " 0 waits until its deadline.",
    )


class RoutingConfig(Section):
    """Which workers run a request."""

    policy: str = Field(
        default="automatic",
        description="Or predicted_seconds, least_loaded, round_robin, random, an entry point of baton.policies, or"
        " module:Class.",
    )
    policy_options: dict[str, bool | int | float | str] = Field(default_factory=dict)  # its keyword arguments
    temperature_seconds: float = Field(
        default=0.0, ge=0, description="Of predicted_seconds: 0 takes the best place, more takes others too."
    )
    profile: str = Field(
        default="",
        description="A file of `baton bench profile`, which predicted_seconds uses until it has measurements.",
    )
    local_prefill_tokens: int = Field(default=0, ge=0)  # shorter prompts run on their decode worker; 0 is off
    early_handoff_tokens: int = Field(
        default=8192,
        ge=0,
        description="Of prompts from this length on, decode workers read KV while the rest is computed; 0 is off.",
    )
    prefix_loans: bool = Field(
        default=False,
        description="Of predicted_seconds: workers pull what others have of a prompt, where computing takes longer.",
    )
    session_slack: float = Field(default=8.0, ge=0)  # how many requests busier a session's own worker may be
    inline_encode: bool = True  # without a dedicated encode worker, use one with other roles
    handoff_within: Domain | None = Field(
        default=None, description="A zone, rack or host, which handoffs do not leave; unset, they go everywhere."
    )
    far_seconds: float = Field(
        default=0.0,
        ge=0,
        description="Prefer near pairs: the added cost of a handoff to another host, rack and zone, for each step.",
    )
    beside: str = Field(
        default="",
        description="A host, as workers advertise it: those there decode, as long as one can run the request. For a"
        " router beside a worker, to which an endpoint picker sends.",
    )


class MovingConfig(Section):
    """Running decodes that are moved to other workers, with their KV."""

    at_once: int = Field(default=8, ge=0, description="Of each worker; 0 moves none.")


class RecordsConfig(Section):
    """Which requests are recorded, and how much of them is kept (docs/replay.md). Nothing, by default."""

    failed: bool = Field(default=False, description="Those that a worker or router has failed; not what is refused.")
    slow_seconds: float = Field(default=0.0, ge=0, description="Those that take longer; 0 records none for it.")
    slow_first_token_seconds: float = Field(default=0.0, ge=0, description="The same of their first token.")
    share: float = Field(default=0.0, ge=0, le=1, description="Of all others, by chance.")
    asked: bool = Field(default=False, description="Those with the metadata x-baton-record: 1.")
    prompts: bool = Field(default=False, description="Whether prompts and answers are kept, or only their digests.")
    max_prompt_bytes: int = Field(
        default=256 * 2**10, ge=0, le=2**19
    )  # of a longer prompt, or longer answers, digests only
    max_bytes: int = Field(default=16 * 2**20, ge=4096, description="In memory; the oldest go first.")
    tenant_bytes: int = Field(default=4 * 2**20, ge=4096, description="Of one tenant.")
    folder: str = Field(default="", description="Where each is written to a file, too; empty writes none.")
    folder_bytes: int = Field(default=2**30, ge=2**20, description="Of all files there; the oldest go first.")

    @property
    def depends_on_end(self) -> bool:
        """True if a request's end may be why it is recorded."""
        return self.failed or self.slow_seconds > 0 or self.slow_first_token_seconds > 0

    @property
    def are_kept(self) -> bool:
        """True if any request is recorded."""
        return self.depends_on_end or self.share > 0 or self.asked


class EmbeddingsConfig(Section):
    """The cache of embeddings."""

    max_bytes: int = Field(default=256 * 2**20, ge=0)  # of all, with 2.5 KiB for each, also leased ones; 0 is off
    leased_idle_seconds: float = Field(default=60.0, gt=0)  # then an embedding on an encode worker is released


class ProbeConfig(Section):
    """Health checks of workers."""

    interval_seconds: float = Field(default=1.0, gt=0)
    timeout_seconds: float = Field(default=1.0, gt=0)
    hung_seconds: float = Field(default=3.0, gt=0)  # without a response, then its requests continue on other workers


class ClientConnections(ConnectionLimits):
    """Limits of one client connection.

    Fewer streams than for workers, whose callers are routers: streams that are opened and reset at once still use the
    event loop, and delay other streams.
    """

    max_streams: int = Field(default=256, ge=1, description="Calls at once; more wait on the caller's side.")


class StoredResponsesConfig(Section):
    """The key `openai.responses`: responses that are kept in the router's memory (docs/openai.md)."""

    max_bytes: int = Field(default=64 * 2**20, ge=0, description="Of all together; the least recently used go first.")
    tenant_bytes: int = Field(default=16 * 2**20, ge=0, description="Of one tenant.")
    seconds: float = Field(default=3600.0, ge=0, description="How long one that has ended stays.")
    max_running: int = Field(default=256, ge=0, description="Responses in the background at once.")
    tenant_running: int = Field(default=128, ge=0, description="Of one tenant.")
    keep_seconds: float = Field(
        default=60.0, ge=0, description="How long one in the background outlives its router, on its decode worker."
    )


class OpenAIConfig(Section):
    """OpenAI's and Anthropic's APIs over HTTP. They need the extra `openai`."""

    listen: str = Field(default="", description="host:port; empty serves it not.")
    tls: TlsConfig | None = None
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    max_connections: int = Field(default=4096, ge=1)
    responses: StoredResponsesConfig = StoredResponsesConfig()


class PickerConfig(Section):
    """The endpoint picker of gateways with the Gateway API Inference Extension (docs/inference-gateway.md).

    It names the router beside the worker that the routing policy chooses, by that worker's host and one of two ports.
    """

    listen: str = Field(default="", description="host:port for Envoy's ext_proc; empty serves it not.")
    tls: TlsConfig | None = None
    openai_port: int = Field(default=8000, ge=1, lt=2**16)  # of the routers beside workers
    grpc_port: int = Field(default=7070, ge=1, lt=2**16)  # the same, for requests of content type application/grpc
    alternatives: int = Field(
        default=2, ge=0, le=16, description="Endpoints that are named after the best one, for the gateway's retries."
    )
    failure: Literal["closed", "open"] = Field(
        default="closed", description="Without a ready endpoint: 503, or `open`, the gateway chooses by itself."
    )
    max_body_bytes: int = Field(
        default=16 * 2**20, ge=0, description="A larger request goes to the least busy worker, unread."
    )
    body_seconds: float = Field(default=60.0, gt=0)  # for the gateway to send the whole request
    pick_seconds: float = Field(
        default=1.0, gt=0, description="To choose by policy, once the request is here; after that by load alone."
    )


class RouterConfig(Section):
    """The whole configuration of `python -m router`."""

    namespace: str = "default"
    router_id: str = Field(default="", description="On its log lines and spans; generated if empty.")
    listen: str = "127.0.0.1:7070"
    tls: TlsSection = TlsSection()  # with a `ca` for listening, callers need certificates
    auth: AuthConfig = AuthConfig()
    processes: int = Field(
        default=1, ge=1, le=256, description="Each with its own event loop, behind the same ports: one a core at most."
    )
    server: ServerKind = Field(default_factory=default_server, description="Our own `http2`, or `grpcio`.")
    connections: ClientConnections = ClientConnections()
    openai: OpenAIConfig = OpenAIConfig()
    picker: PickerConfig = PickerConfig()
    metrics_listen: str = ""  # host:port; the host defaults to 127.0.0.1; empty turns metrics off
    metrics_tls: TlsConfig | None = None
    announce_seconds: float = Field(
        default=0.0, ge=0, description="After SIGTERM, NOT_SERVING but taking requests, until balancers have heard."
    )
    drain_seconds: float = Field(default=30.0, ge=0)
    allow_faults: bool = False  # whether x-baton-fault is accepted; for tests only
    registry: RegistryConfig = RegistryConfig()
    log: LogConfig = LogConfig()
    limits: LimitsConfig = LimitsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    quotas: QuotasConfig = QuotasConfig()
    peers: PeersConfig = PeersConfig()
    retry: RetryConfig = RetryConfig()
    routing: RoutingConfig = RoutingConfig()
    moving: MovingConfig = MovingConfig()
    records: RecordsConfig = RecordsConfig()
    probe: ProbeConfig = ProbeConfig()
    multiplex: bool = Field(default=True, description="Whether calls share one stream to each worker that offers it.")
    worker_streams: ServerKind | None = Field(
        default=None,
        description="The client of those streams, `grpcio` or our own `http2`; by default the same as `server`.",
    )
    tracing: TracingConfig = TracingConfig()
    media: MediaConfig = MediaConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()

    @property
    def fairness(self) -> Fairness:
        """The order of waiting requests."""
        tells_tenants = self.auth.tokens_file is not None or self.tls.is_mutual or not self.quotas.are_none
        return self.admission.fairness or ("weighted" if tells_tenants else "none")

    @property
    def shares_limits(self) -> bool:
        """True if routers share quotas or places."""
        return self.peers.enabled and (not self.quotas.are_none or self.admission.max_running_per_worker > 0)

    @property
    def shares_records(self) -> bool:
        """True if other routers get this one's records. Of authenticated callers, only if routers are, too."""
        is_open = self.auth.tokens_file is None or self.tls.is_mutual or not self.peers.listen
        return self.peers.enabled and self.records.are_kept and is_open

    @property
    def shares_with_peers(self) -> bool:
        """True if other routers share something with this one."""
        return self.shares_limits or self.shares_records

    def named(self) -> "RouterConfig":
        """The same configuration, with a router id."""
        return self.model_copy(update={"router_id": self.router_id or f"router-{token_hex(4)}"})
