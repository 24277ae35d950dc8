"""Which registry a process uses, as read from its configuration."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from pydantic import Field

from discovery.etcd.config import EtcdConfig
from discovery.etcd.registry import EtcdRegistry
from discovery.memory import MemoryRegistry
from discovery.registry import Registry


class RegistryConfig(EtcdConfig):
    """The key `registry`. Of kind `memory` it ends at the process, and what is said of etcd has no effect.

    A worker that dies is gone after `lease_ttl_seconds`. `outage_grace_seconds`, the same if unset, is for how long
    nobody is taken for gone after etcd was out of reach.
    """

    kind: Literal["etcd", "memory"] = "etcd"
    lease_ttl_seconds: float = Field(default=10.0, ge=1)
    outage_grace_seconds: float | None = Field(default=None, ge=0)


@asynccontextmanager
async def open_registry(config: RegistryConfig, namespace: str) -> AsyncIterator[Registry]:
    """The registry that `config` names; it does not connect before it is used. Raises ConfigError."""
    match config.kind:
        case "memory":
            yield MemoryRegistry(namespace)
        case "etcd":
            async with EtcdRegistry(
                config, namespace, config.lease_ttl_seconds, config.outage_grace_seconds
            ) as registry:
                yield registry
