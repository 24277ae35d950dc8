"""Over tcp with TLS a reader trusts only owners with a worker's certificate of its own authority."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.certificates import Authority
from support.transports.grants import HANDOFF_ID, EveryBlock

from rpc.auth.tls import TlsConfig
from runtime.aio import timeout
from services.engines.memory.shared_pool import SharedPool
from services.transports.base import PoolShape, Transfer, TransportUnavailable
from services.transports.registry import open_transports
from services.transports.secure import OwnerTls
from services.transports.tcp_server import PoolServer, serve_pool

BLOCKS, BLOCK_BYTES = 4, 1024


@asynccontextmanager
async def owner(tls: TlsConfig) -> AsyncIterator[PoolServer]:
    with SharedPool(BLOCKS, BLOCK_BYTES) as pool:
        async with serve_pool(pool, "127.0.0.1", EveryBlock(), OwnerTls(tls)) as server:
            yield server


async def pull(server: PoolServer, tls: TlsConfig) -> None:
    endpoint = server.endpoint("127.0.0.1")
    with SharedPool(BLOCKS, BLOCK_BYTES) as ours:
        async with open_transports(("tcp",), tls=tls) as [transport], timeout(50):
            reader = await transport.open(endpoint, PoolShape(BLOCKS, BLOCK_BYTES))
            try:
                await reader.pull(Transfer([1], ours, [2], time.monotonic() + 5, HANDOFF_ID))
            finally:
                reader.close()


def certificate(authority: Authority, name: str, *uris: str, ca: Path | None = None) -> TlsConfig:
    pair = authority.issue(name, uris=uris)
    return TlsConfig(ca=ca, cert=pair.cert, key=pair.key)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


async def test_an_authority_that_only_the_system_trusts_is_not_trusted(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = Authority(tmp_path, "public")
    monkeypatch.setenv("SSL_CERT_FILE", str(public.ca))  # OpenSSL's list of the system's authorities
    reader = certificate(authority, "reader", "baton://worker/reader", ca=authority.ca)
    async with owner(certificate(public, "owner", "baton://worker/owner")) as server:
        with pytest.raises(TransportUnavailable, match=r"self-signed certificate|unable to get local issuer"):
            await pull(server, reader)


async def test_without_an_authority_of_its_own_a_reader_trusts_the_system(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    async with owner(certificate(authority, "owner", "baton://worker/owner")) as server:
        await pull(server, TlsConfig())


@pytest.mark.parametrize("role", ["client", "operator"])
@pytest.mark.parametrize("has_certificate", [True, False])
async def test_an_owner_of_another_role_is_not_trusted(authority: Authority, role: str, has_certificate: bool) -> None:
    reader = certificate(authority, "reader", "baton://worker/reader", ca=authority.ca)
    if not has_certificate:
        reader = TlsConfig(ca=authority.ca)
    async with owner(certificate(authority, "owner", f"baton://{role}/mallory")) as server:
        with pytest.raises(TransportUnavailable, match=f"mallory is {role}; KV is read from workers only"):
            await pull(server, reader)


async def test_with_mutual_tls_an_owner_must_name_its_role(authority: Authority) -> None:
    reader = certificate(authority, "reader", "baton://worker/reader", ca=authority.ca)
    async with owner(certificate(authority, "owner", ca=authority.ca)) as server:
        with pytest.raises(TransportUnavailable, match="0 URIs baton://ROLE/NAME"):
            await pull(server, reader)


async def test_without_mutual_tls_an_owner_needs_no_role(authority: Authority) -> None:
    async with owner(certificate(authority, "owner")) as server:
        await pull(server, TlsConfig(ca=authority.ca))


async def test_a_worker_of_the_authority_is_trusted(authority: Authority) -> None:
    reader = certificate(authority, "reader", "baton://worker/reader", ca=authority.ca)
    async with owner(certificate(authority, "owner", "baton://worker/owner", ca=authority.ca)) as server:
        await pull(server, reader)
