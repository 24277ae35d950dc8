"""What can be set of a worker."""

import secrets
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from discovery.config import RegistryConfig
from media.config import MediaConfig
from rpc.channels import MAX_RECEIVE_BYTES
from rpc.config import Section
from rpc.serve import ConnectionLimits
from rpc.telemetry import LogFormat, LogLevel
from rpc.tls import TlsConfig, TlsSection
from rpc.tracing.config import TracingConfig
from services.engines.pytorch.config import PyTorchConfig
from services.engines.simulated_config import SimulatedConfig
from services.engines.trtllm.config import TrtllmConfig
from services.identity import ROLES, Role

EngineConfig = Annotated[PyTorchConfig | SimulatedConfig | TrtllmConfig, Field(discriminator="kind")]
TransportName = Literal["shm", "nixl", "tcp"]


class HandoffConfig(Section):
    """The key `handoff`."""

    lease_seconds: float = Field(default=10.0, gt=0, description="How long a handoff is held unless it is renewed.")


class NixlConfig(Section):
    """The key `nixl`, of the transport of that name."""

    devices: tuple[Annotated[str, Field(pattern=r"^[\w.:-]+$")], ...] = Field(
        default=("lo",), min_length=1, description="What UCX may use: interfaces, or RDMA ports such as mlx5_0:1."
    )
    unencrypted: bool = Field(default=False, description="Lets it be used beside TLS, which it does not have.")


class EncodeConfig(Section):
    """The key `encode`."""

    inline_bytes: int = Field(default=2**20, ge=0, description="Larger embeddings are not in answers, but leased.")
    pool_bytes: int = Field(default=64 * 2**20, ge=1, description="What leased embeddings may take together.")
    max_items: int = Field(default=16, ge=1, description="Media of one request.")

    @model_validator(mode="after")
    def _answers_fit_in_a_message(self) -> "EncodeConfig":
        if self.inline_bytes * self.max_items > MAX_RECEIVE_BYTES // 2:
            raise ValueError(f"inline_bytes times max_items must be {MAX_RECEIVE_BYTES // 2} at most")
        return self


class LogConfig(Section):
    """The key `log`."""

    format: LogFormat = "json"
    level: LogLevel = "info"


class WorkerConfig(Section):
    """A worker process."""

    namespace: str = Field(default="default", min_length=1)
    worker_id: str = Field(default="", description="Generated if empty.")
    roles: tuple[Role, ...] = Field(default=("prefill", "decode"), min_length=1)
    listen: str = "127.0.0.1:0"
    advertise: str = Field(default="", description="Where others reach it; what it really listens on if empty.")
    registry: RegistryConfig = RegistryConfig()
    engine: EngineConfig = SimulatedConfig()
    chat_template: Path | None = Field(default=None, description="A Jinja file, in the place of the model's own.")
    handoff: HandoffConfig = HandoffConfig()
    encode: EncodeConfig = EncodeConfig()
    media: MediaConfig = MediaConfig()
    transports: tuple[TransportName, ...] = Field(default=("shm", "tcp"), min_length=1)
    nixl: NixlConfig = NixlConfig()
    tls: TlsSection = Field(default=TlsSection(), description="With a `ca` to listen with, callers need certificates.")
    connections: ConnectionLimits = ConnectionLimits()
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
        generated = f"{'-'.join(self.roles)}-{secrets.token_hex(4)}"
        return self.model_copy(update={"worker_id": self.worker_id or generated})

    @field_validator("roles", mode="before")
    @classmethod
    def _roles_are_known(cls, roles: object) -> object:
        for index, role in enumerate(roles if isinstance(roles, (list, tuple)) else ()):
            if role not in ROLES:
                raise ValueError(f"roles[{index}]: {role!r} is no role; valid are {', '.join(ROLES)}")
        return roles

    @model_validator(mode="after")
    def _nixl_is_not_mistaken_for_secure(self) -> "WorkerConfig":
        if "nixl" in self.transports and self.tls.listen is not None and not self.nixl.unencrypted:
            raise ValueError("transports: nixl has no TLS and asks nobody who he is; nixl.unencrypted=true allows it")
        return self
