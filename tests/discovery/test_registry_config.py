"""The configuration key `registry`."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.router.worker_views import Views, worker
from support.servers.etcd import EtcdServer

from discovery.config import RegistryConfig, open_registry


def test_a_registry_is_the_local_etcd_unless_something_else_is_said() -> None:
    assert (RegistryConfig().kind, RegistryConfig().addresses) == ("etcd", ("127.0.0.1:2379",))


def test_a_password_is_not_shown() -> None:
    assert "sesame" not in repr(RegistryConfig.model_validate({"username": "ali", "password": "sesame"}))


def test_endpoints_may_be_urls() -> None:
    config = RegistryConfig.model_validate({"endpoints": ["http://etcd-0:2379/", "etcd-1:2379"]})
    assert config.addresses == ("etcd-0:2379", "etcd-1:2379")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"kind": "zookeeper"}, "kind"),
        ({"kind": "file"}, "folder"),
        ({"folder": "/mnt/registry"}, "folder"),
        ({"kind": "file", "folder": "/mnt/registry", "poll_seconds": 0}, "poll_seconds"),
        ({"endpoint": "127.0.0.1:2379"}, "endpoint"),
        ({"endpoints": []}, "endpoints"),
        ({"endpoints": ["etcd-0"]}, "endpoints"),
        ({"endpoints": ["etcd-0:http"]}, "endpoints"),
        ({"endpoints": ["https://etcd-0:2379"]}, "https"),
        ({"endpoints": ["http://etcd-0:2379"], "tls": {}}, "https"),
        ({"tls": {"cert": "a.pem"}}, "tls"),
        ({"lease_ttl_seconds": 0}, "lease_ttl_seconds"),
        ({"call_timeout_seconds": -1}, "call_timeout_seconds"),
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        RegistryConfig.model_validate(wrong)


async def test_a_memory_registry_is_opened_without_a_server() -> None:
    async with (
        open_registry(RegistryConfig(kind="memory"), "test") as registry,
        registry.register(worker("w1")),
        Views(registry) as views,
    ):
        await views.until_ids("w1")


async def test_an_etcd_registry_is_opened(shared_etcd: EtcdServer, namespace: str) -> None:
    config = RegistryConfig(endpoints=(shared_etcd.endpoint,), lease_ttl_seconds=2)
    async with (
        open_registry(config, namespace) as registry,
        registry.register(worker("w1")),
        Views(registry) as views,
    ):
        await views.until_ids("w1")


async def test_a_file_registry_is_opened(tmp_path: Path, namespace: str) -> None:
    config = RegistryConfig.model_validate({"kind": "file", "folder": str(tmp_path), "poll_seconds": 0.02})
    async with (
        open_registry(config, namespace) as registry,
        registry.register(worker("w1")),
        Views(registry) as views,
    ):
        await views.until_ids("w1")
