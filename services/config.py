"""The configuration of a worker."""

import socket
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, field_validator, model_validator

from baton.connection.settings import MAX_RECEIVE_BYTES
from baton.errors import ConfigError
from discovery.config import RegistryConfig
from discovery.record import LABEL, Location
from engine_protocol.roles import Role, role_kinds, with_kv
from media.config import MediaConfig
from rpc.auth.tls import TlsConfig, TlsSection
from rpc.server import ConnectionLimits, ServerKind, default_server
from rpc.tracing.exporter import TracingConfig
from runtime.config import Section
from runtime.entropy import token_hex
from runtime.telemetry.logs import LogConfig
from services.engines.context import EngineConfig
from services.engines.registry import read_engine_config
from services.engines.simulated.config import SimulatedConfig
from services.sleeping.config import SleepConfig
from services.transports.registry import read_options, transport_class


class HandoffConfig(Section):
    """The key `handoff`."""

    lease_seconds: float = Field(default=10.0, gt=0, description="How long a handoff is held unless it is renewed.")
    held_share: float = Field(
        default=0.5, gt=0, le=1, description="Share of the pool that handoffs may use on a worker that also decodes."
    )
    held_wait_seconds: float = Field(
        default=1.0, gt=0, description="How long a decode waits for blocks that are held for other workers."
    )
    verify: Literal["off", "sample", "always"] = Field(
        default="off",
        description="Compare the content of handoffs with that of their owners before it is used.",
    )
    verify_every: int = Field(default=64, ge=1, description="Of so many handoffs `verify: sample` compares one.")

    @field_validator("verify", mode="before")
    @classmethod
    def _off_is_no_false(cls, verify: object) -> object:
        return "off" if verify is False else verify  # YAML reads `off` as false

    @property
    def check_every(self) -> int:
        """Of so many handoffs one is compared; 0 for none."""
        return {"off": 0, "sample": self.verify_every, "always": 1}[self.verify]


class EncodeConfig(Section):
    """The key `encode`."""

    inline_bytes: int = Field(
        default=2**20, ge=0, description="Larger embeddings are leased instead of sent in the answer."
    )
    pool_bytes: int = Field(default=64 * 2**20, ge=1, description="What leased embeddings may take together.")
    max_items: int = Field(default=16, ge=1, description="Media of one request.")

    @model_validator(mode="after")
    def _answers_fit_in_a_message(self) -> "EncodeConfig":
        if self.inline_bytes * self.max_items > MAX_RECEIVE_BYTES // 2:
            raise ValueError(f"inline_bytes times max_items must be {MAX_RECEIVE_BYTES // 2} at most")
        return self


class EmbedConfig(Section):
    """The key `embed`."""

    max_inputs: int = Field(default=256, ge=1, description="Texts of one call.")


class KeepConfig(Section):
    """The key `keep`: decodes that go on while no router reads them. They yield to requests that find no room."""

    max_seconds: float = Field(default=60.0, ge=0, description="How long one goes on at most; 0 keeps none.")
    max_parked: int = Field(default=256, ge=1, description="How many go on at once; of more, the oldest ends.")
    max_finished_bytes: int = Field(default=64 * 2**20, ge=0, description="What those that have ended take together.")
    logprob_bytes: int = Field(default=256 * 2**10, ge=0, description="Of each, the last log probabilities.")


class KeepMemoryConfig(Section):
    """The key `keep_memory`: what a keeper process holds while the worker's process is replaced (docs/keeping.md)."""

    weights: bool = Field(default=False, description="A worker that starts again finds its weights in memory.")
    kv: bool = Field(default=False, description="It finds its KV too: of running answers, and of its prefix cache.")
    imports: bool = Field(
        default=True,
        description="It has imported its code: it is forked from a copy of the process that has done only that.",
    )
    standby: bool = Field(
        default=False,
        description="The next process is started ahead: it has loaded all but the KV when the worker is lost.",
    )
    hang_seconds: float = Field(
        default=10.0,
        ge=2,
        le=3600,
        description="A worker whose event loop hangs for so long is killed and started again.",
    )

    start_seconds: float = Field(
        default=1800.0,
        ge=10,
        le=86400,
        description="A worker that is not ready after so long is killed and started again.",
    )

    @model_validator(mode="after")
    def _stands_by_with_kv(self) -> "KeepMemoryConfig":
        if self.standby and not (self.weights and self.kv):
            raise ValueError("standby: needs weights and kv, which the process that stands by takes over")
        return self

    @property
    def is_on(self) -> bool:
        """True if the worker has a keeper."""
        return self.weights or self.kv


class LocationConfig(Section):
    """The worker's location, for routers that prefer near pairs or bound handoffs: labels, as of Kubernetes' nodes."""

    zone: str = Field(default="", pattern=f"^{LABEL}$")
    rack: str = Field(default="", pattern=f"^{LABEL}$", description="Within its zone.")
    host: str = Field(default="", pattern=f"^{LABEL}$", description="That of its address if empty.")

    @property
    def labels(self) -> Location:
        """The labels as its record has them."""
        return Location(self.zone, self.rack, self.host)


class WorkerConfig(Section):
    """A worker process."""

    namespace: str = Field(default="default", min_length=1)
    worker_id: str = Field(default="", description="Generated if empty.")
    roles: tuple[Role, ...] = Field(default=("prefill", "decode"), min_length=1)
    listen: str = "127.0.0.1:0"
    advertise: str = Field(default="", description="Address at which others reach it; if empty, the one it listens on.")
    location: LocationConfig = LocationConfig()
    registry: RegistryConfig = RegistryConfig()
    engine: Annotated[EngineConfig, PlainValidator(read_engine_config)] = SimulatedConfig()
    chat_template: Path | None = Field(default=None, description="A Jinja file, in the place of the model's own.")
    handoff: HandoffConfig = HandoffConfig()
    encode: EncodeConfig = EncodeConfig()
    embed: EmbedConfig = EmbedConfig()
    keep: KeepConfig = KeepConfig()
    keep_memory: KeepMemoryConfig = KeepMemoryConfig()
    sleep: SleepConfig = SleepConfig()
    media: MediaConfig = MediaConfig()
    transports: tuple[str, ...] = Field(
        default=("cuda_ipc", "shm", "tcp"),
        min_length=1,
        description="In the order of preference: names, or module:Class.",
    )
    transport_options: dict[str, dict[str, Any]] = Field(default={}, description="By the transport's name.")
    tls: TlsSection = Field(default=TlsSection(), description="With a `ca` to listen with, callers need certificates.")
    server: ServerKind = Field(default_factory=default_server, description="Our own `http2`, or `grpcio`.")
    # Twice a router's fields: with a prompt a router sends the blocks of its KV, too.
    connections: ConnectionLimits = ConnectionLimits(max_message_fields=131_072)
    metrics_listen: str = Field(default="", description="host:port; without a host 127.0.0.1; empty serves none.")
    metrics_tls: TlsConfig | None = None
    drain_seconds: float = Field(default=30.0, ge=0)
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()

    @property
    def advertised_host(self) -> str:
        """The name by which others know this host: of a worker that listens everywhere, the host's own."""
        host = (self.advertise or self.listen).rpartition(":")[0].strip("[]")
        return socket.gethostname() if host in ("", "0.0.0.0", "::") else host

    def named(self) -> "WorkerConfig":
        """The same, with a worker id."""
        generated = f"{'-'.join(self.roles)}-{token_hex(4)}"
        return self.model_copy(update={"worker_id": self.worker_id or generated})

    @field_validator("roles", mode="before")
    @classmethod
    def _roles_are_known(cls, roles: object) -> object:
        known = list(role_kinds())
        for index, role in enumerate(roles if isinstance(roles, (list, tuple)) else ()):
            if role not in known:
                raise ValueError(f"roles[{index}]: unknown role {role!r}; expected one of {', '.join(known)}")
        return roles

    @model_validator(mode="after")
    def _memory_can_be_kept(self) -> "WorkerConfig":
        if self.keep_memory.is_on and self.server != "http2":
            raise ValueError("keep_memory: needs server=http2, which can listen at a socket that is kept")
        if self.keep_memory.is_on and not set(self.roles) & with_kv():
            raise ValueError(f"keep_memory: roles: a worker of {', '.join(self.roles)} has nothing that can be kept")
        kept = self.keep_memory
        if kept.is_on and (why_not := self.engine.why_not_kept(weights=kept.weights, kv=kept.kv)):
            raise ValueError(f"keep_memory: {why_not}")
        return self

    @model_validator(mode="after")
    def _may_sleep(self) -> "WorkerConfig":
        if self.sleep.group is not None and self.keep_memory.standby:
            raise ValueError("sleep: keep_memory.standby: a process that stands by cannot share the group's memory")
        if self.sleep.group is not None and set(self.roles) != with_kv():
            raise ValueError("sleep: roles: must be prefill and decode: what a worker hands over it cannot free")
        return self

    @model_validator(mode="after")
    def _transports_can_be_used(self) -> "WorkerConfig":
        try:
            classes = [transport_class(name) for name in self.transports]
            for transport in classes:
                options = read_options(transport, self.transport_options)
                if self.tls.listen is not None and not transport.supports_tls and not options.unencrypted:
                    raise ValueError(
                        f"transports: {transport.name} has neither TLS nor authentication; "
                        f"set transport_options.{transport.name}.unencrypted=true to allow it"
                    )
        except ConfigError as error:
            raise ValueError(error.message) from error
        if unused := sorted(set(self.transport_options) - {transport.name for transport in classes}):
            raise ValueError(f"transport_options.{unused[0]}: the transport is not in transports")
        return self
