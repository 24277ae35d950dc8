"""The key `registry`: etcd, a shared folder, or memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from discovery.etcd.config import EtcdConfig
from discovery.etcd.registry import EtcdRegistry
from discovery.file.registry import FileRegistry
from discovery.memory import MemoryRegistry
from discovery.registry import DEFAULT_LEASE_SECONDS, Registry


class RegistryConfig(EtcdConfig):
    """The key `registry`. Kind `file` is a folder that all hosts share; kind `memory` is within one process.

    A worker that dies is removed after `lease_ttl_seconds`. For `outage_grace_seconds` after an outage of the registry
    no worker is removed; unset, it equals `lease_ttl_seconds`. Kinds other than `etcd` ignore its settings; `file` has
    `folder`, which it lists every `poll_seconds`, and both timeouts.
    """

    kind: Literal["etcd", "file", "memory"] = "etcd"
    lease_ttl_seconds: float = Field(default=DEFAULT_LEASE_SECONDS, ge=1)
    outage_grace_seconds: float | None = Field(default=None, ge=0)
    folder: Path | None = None
    poll_seconds: float = Field(default=0.25, ge=0.01)

    @model_validator(mode="after")
    def _folder_of_a_file_registry(self) -> Self:
        if (self.kind == "file") != (self.folder is not None):
            raise ValueError("folder: a registry of kind file needs it, and no other kind has one")
        return self


@asynccontextmanager
async def open_registry(config: RegistryConfig, namespace: str) -> AsyncIterator[Registry]:
    """The configured registry, which connects on first use. Raises ConfigError."""
    match config.kind:
        case "memory":
            yield MemoryRegistry(namespace)
        case "file":
            assert config.folder is not None
            async with FileRegistry(
                config.folder,
                namespace,
                config.lease_ttl_seconds,
                config.outage_grace_seconds,
                poll_seconds=config.poll_seconds,
                call_timeout_seconds=config.call_timeout_seconds,
                start_timeout_seconds=config.start_timeout_seconds,
            ) as registry:
                yield registry
        case "etcd":
            async with EtcdRegistry(
                config, namespace, config.lease_ttl_seconds, config.outage_grace_seconds
            ) as registry:
                yield registry
