"""The credentials of `baton`: options before the environment, tokens over TLS only."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.certificates import Authority, Pair
from support.clients.baton_command import Baton
from support.lifetimes import in_one_task

from baton import AsyncClient, Tls
from baton.errors import ConfigError, PermissionDenied, Unauthenticated
from discovery.memory import MemoryRegistry
from router.config import RouterConfig
from router.server import host_router
from rpc.auth.access import AuthConfig
from rpc.auth.tls import TlsConfig, TlsSection

CLIENT, OPERATOR = "client-0123456789abcdef", "operator-0123456789abcdef"


class Guarded:
    """A router with TLS and tokens, and the files to reach it."""

    def __init__(self, address: str, authority: Authority) -> None:
        self.address = address
        self.ca = str(authority.ca)
        self.tls = Tls(ca=authority.ca)


@asynccontextmanager
async def router(folder: Path) -> AsyncIterator[Guarded]:
    authority = Authority(folder, "ours")
    pair: Pair = authority.issue("router")
    tokens = folder / "tokens.yaml"
    digest = hashlib.sha256(OPERATOR.encode()).hexdigest()
    tokens.write_text(f"tokens: [{{name: alice, token: {CLIENT}}}, {{name: root, role: operator, sha256: {digest}}}]\n")
    config = RouterConfig(
        listen="127.0.0.1:0",
        drain_seconds=0,
        tls=TlsSection(listen=TlsConfig(cert=pair.cert, key=pair.key)),
        auth=AuthConfig(tokens_file=tokens),
    )
    async with host_router(config, MemoryRegistry("test")) as running:
        yield Guarded(running.address, authority)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with in_one_task(router(tmp_path)) as running:
        yield running


async def test_a_token_file_and_an_authority_open_the_router(guarded: Guarded, baton: Baton, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(OPERATOR + "\n")
    outcome = await baton("workers", "--address", guarded.address, "--ca", guarded.ca, "--token-file", "token")
    assert (outcome.code, outcome.out) == (0, "no worker is registered\n")


async def test_the_environment_says_the_same(
    guarded: Guarded, baton: Baton, tmp_path: Path, environment: dict[str, str]
) -> None:
    environment |= {"BATON_ADDRESS": guarded.address, "BATON_CA": guarded.ca, "BATON_TOKEN": OPERATOR}
    assert (await baton("workers")).out == "no worker is registered\n"


async def test_a_wrong_token_is_said_without_the_token(
    guarded: Guarded, baton: Baton, environment: dict[str, str]
) -> None:
    environment["BATON_TOKEN"] = "wrong-0123456789abcdef"
    outcome = await baton("models", "--address", guarded.address, "--ca", guarded.ca)
    assert outcome.code == 1
    assert "UNAUTHENTICATED: the token is not valid" in outcome.err
    assert "wrong-" not in outcome.err


async def test_a_client_may_not_list_workers(guarded: Guarded) -> None:
    async with AsyncClient(guarded.address, tls=guarded.tls, token=CLIENT) as client:
        assert await client.models() == []
        with pytest.raises(PermissionDenied):
            await client.workers()


async def test_no_token_gets_nothing(guarded: Guarded) -> None:
    async with AsyncClient(guarded.address, tls=guarded.tls) as client:
        with pytest.raises(Unauthenticated):
            await client.models()


def test_a_token_does_not_leave_this_host_in_plain_text() -> None:
    with pytest.raises(ConfigError, match="over TLS only"):
        AsyncClient("router.example:7070", token=CLIENT)


async def test_a_certificate_without_its_key_is_a_config_error(baton: Baton) -> None:
    outcome = await baton("models", "--cert", "mine.pem")
    assert outcome.code == 2
    assert "--cert and --key must be given together" in outcome.err
