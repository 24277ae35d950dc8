"""TLS between a server and its callers, in one direction and in both."""

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.certificates import Authority

from baton.calls import unary
from baton.errors import ConfigError, Unavailable
from rpc.auth.tls import TlsConfig
from rpc.channels import open_channel
from rpc.health import SERVING, Health
from rpc.server import ServerOptions, serve


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def own(authority: Authority, name: str, ca: Path | None = None) -> TlsConfig:
    """Presents a certificate of `authority`, and verifies peers against `ca`."""
    pair = authority.issue(name)
    return TlsConfig(ca=ca, cert=pair.cert, key=pair.key)


async def health_through(server_tls: TlsConfig, channel_tls: TlsConfig | None) -> int:
    health = Health()
    health.set("", True)
    async with (
        serve("127.0.0.1:0", [], health=health, options=ServerOptions(tls=server_tls)) as server,
        open_channel(server.address, channel_tls) as channel,
    ):
        return (await unary(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()))).status


async def test_a_caller_that_trusts_the_authority_is_served(authority: Authority) -> None:
    assert await health_through(own(authority, "server"), TlsConfig(ca=authority.ca)) == SERVING


async def test_a_server_of_another_authority_is_not_trusted(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    with pytest.raises(Unavailable):
        await health_through(own(authority, "server"), TlsConfig(ca=other.ca))


async def test_a_caller_without_tls_is_not_served(authority: Authority) -> None:
    with pytest.raises(Unavailable):
        await health_through(own(authority, "server"), None)


async def test_mutual_tls_serves_a_caller_with_a_certificate(authority: Authority) -> None:
    server, caller = own(authority, "server", authority.ca), own(authority, "caller", authority.ca)
    assert await health_through(server, caller) == SERVING


async def test_mutual_tls_refuses_a_caller_without_a_certificate(authority: Authority) -> None:
    with pytest.raises(Unavailable):
        await health_through(own(authority, "server", authority.ca), TlsConfig(ca=authority.ca))


async def test_mutual_tls_refuses_a_certificate_of_another_authority(authority: Authority, tmp_path: Path) -> None:
    intruder = own(Authority(tmp_path, "other"), "intruder", authority.ca)
    with pytest.raises(Unavailable):
        await health_through(own(authority, "server", authority.ca), intruder)


async def test_a_server_without_a_certificate_is_a_config_error(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="a server needs cert and key"):
        await health_through(TlsConfig(ca=authority.ca), None)


def test_a_file_that_is_missing_is_a_config_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls\.ca: cannot read .*missing\.pem"):
        open_channel("127.0.0.1:1", TlsConfig(ca=tmp_path / "missing.pem"))


async def test_files_that_are_no_certificates_are_a_config_error(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    with pytest.raises(ConfigError):
        await health_through(TlsConfig(cert=garbage, key=garbage), None)
