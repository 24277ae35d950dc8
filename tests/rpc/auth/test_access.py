"""Which callers may call which methods: certificates, tokens and roles, over the wire."""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hyperframe.frame import HeadersFrame
from support.certificates import Authority
from support.cluster.server_kind import SERVER_KIND
from support.http2.peer import head, peer_of
from support.servers.scripted_router import NAME, service

from baton.errors import ConfigError
from baton.inference.v1 import model_pb2
from rpc.auth.access import Access, AuthConfig, Rules, open_access, read_tokens
from rpc.auth.caller import current_caller
from rpc.auth.tls import TlsConfig
from rpc.channels import open_channel
from rpc.health import Health
from rpc.server import ConnectionLimits, Server, ServerOptions, serve

ALICE, ADMIN = "alice-0123456789abcdef", "admin-0123456789abcdef"
RULES: Rules = {
    f"/{NAME}/": frozenset({"client"}),
    f"/{NAME}/GetModel": frozenset({"operator"}),
}


async def list_models(request: model_pb2.ListModelsRequest, context: object) -> model_pb2.ListModelsResponse:
    caller = current_caller()
    assert caller is not None
    return model_pb2.ListModelsResponse(models=[model_pb2.Model(name=f"{caller.role}:{caller.name}")])


async def get_model(request: model_pb2.GetModelRequest, context: object) -> model_pb2.GetModelResponse:
    return model_pb2.GetModelResponse()


def serving(
    access: Access | None, tls: TlsConfig | None = None, limits: ConnectionLimits | None = None
) -> AbstractAsyncContextManager[Server]:
    services = [service({"ListModels": list_models, "GetModel": get_model})]
    health = Health()
    health.set("", True)
    options = ServerOptions(tls=tls, access=access, connections=limits or ConnectionLimits())
    return serve("127.0.0.1:0", services, health=health, options=options)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.yaml"
    digest = hashlib.sha256(ADMIN.encode()).hexdigest()
    path.write_text(f"tokens:\n- {{name: alice, token: {ALICE}}}\n- {{name: root, role: operator, sha256: {digest}}}\n")
    return path


@pytest.fixture
def access(tokens_file: Path) -> Access:
    opened = open_access(AuthConfig(tokens_file=tokens_file), RULES, mutual_tls=False)
    assert opened is not None
    return opened


async def ask(
    server: Server,
    method: str = "ListModels",
    tls: TlsConfig | None = None,
    metadata: Sequence[tuple[str, str]] = (),
) -> str:
    """The caller as the server knows it, or the name of the status."""
    async with open_channel(server.address, tls) as channel:
        call = channel.unary_unary(
            f"/{NAME}/{method}",
            request_serializer=model_pb2.ListModelsRequest.SerializeToString,
            response_deserializer=model_pb2.ListModelsResponse.FromString,
        )
        try:
            answer = await call(model_pb2.ListModelsRequest(), metadata=tuple(metadata), timeout=60)
        except aio.AioRpcError as error:
            return error.code().name
        return answer.models[0].name if answer.models else "OK"


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


async def test_a_token_says_who_calls(access: Access) -> None:
    async with serving(access) as server:
        assert await ask(server, metadata=bearer(ALICE)) == "client:alice"


async def test_a_token_is_known_by_its_digest_too(access: Access) -> None:
    async with serving(access) as server:
        assert await ask(server, "GetModel", metadata=bearer(ADMIN)) == "OK"


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        bearer("wrong-0123456789abcdef"),
        bearer(ALICE[:-1]),
        bearer(ALICE + "x"),
        bearer(""),
        [("authorization", ALICE)],
        [("authorization", f"Basic {ALICE}")],
        [*bearer(ALICE), *bearer(ADMIN)],
    ],
    ids=["none", "wrong", "cut", "longer", "empty", "bare", "basic", "two"],
)
async def test_anything_else_than_a_right_token_is_unauthenticated(
    access: Access, metadata: list[tuple[str, str]]
) -> None:
    async with serving(access) as server:
        assert await ask(server, metadata=metadata) == "UNAUTHENTICATED"


@pytest.mark.skipif(SERVER_KIND == "grpcio", reason="grpcio's server reads a request before it asks for the caller")
@pytest.mark.parametrize(
    ("method", "metadata", "status"),
    [("ListModels", [], 16), ("ListModels", bearer("wrong-0123456789abcdef"), 16), ("GetModel", bearer(ALICE), 7)],
)
async def test_a_stranger_is_refused_before_its_request_has_come(
    access: Access, method: str, metadata: list[tuple[str, str]], status: int
) -> None:
    async with serving(access) as server, peer_of(server.port) as peer:
        block = peer.block(head("", *metadata, path=f"/{NAME}/{method}"))
        await peer.send(HeadersFrame(1, block, flags=["END_HEADERS"]))
        assert (await peer.ended(1)).status == status
        assert peer.answer(1).headers[0]["grpc-message"]


@pytest.mark.parametrize("size", [10, 5 * 2**20])
async def test_a_refused_caller_gets_the_status_whatever_it_sends(access: Access, size: int) -> None:
    async with serving(access) as server, open_channel(server.address, None) as channel:
        for _ in range(5):
            with pytest.raises(aio.AioRpcError) as refused:
                await channel.unary_unary(f"/{NAME}/ListModels")(bytes(size), timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_method_of_another_role_is_denied(access: Access) -> None:
    async with serving(access) as server:
        assert await ask(server, "GetModel", metadata=bearer(ALICE)) == "PERMISSION_DENIED"


async def test_a_method_without_a_rule_is_refused_to_all(tokens_file: Path) -> None:
    async with serving(Access({}, read_tokens(tokens_file))) as server:
        assert await ask(server, metadata=bearer(ALICE)) == "PERMISSION_DENIED"


async def test_everybody_may_ask_for_the_health_unless_it_is_closed(tokens_file: Path) -> None:
    codes = []
    for open_health in (True, False):
        access = Access(RULES, read_tokens(tokens_file), open_health)
        async with serving(access) as server, open_channel(server.address) as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
                codes.append(grpc.StatusCode.OK)
            except aio.AioRpcError as error:
                codes.append(error.code())
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED]


async def test_reflection_needs_a_token_of_any_role(access: Access) -> None:
    def ask_for_services(stub: reflection_pb2_grpc.ServerReflectionStub, *metadata: tuple[str, str]) -> int:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        [answer] = stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=60)
        return len(answer.list_services_response.service)

    async with serving(access) as server:
        with grpc.insecure_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(ask_for_services, stub)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await asyncio.to_thread(ask_for_services, stub, *bearer(ADMIN))


@pytest.mark.skipif(SERVER_KIND == "grpcio", reason="grpcio's server does not wait for the client's first message")
async def test_a_refusal_of_a_stream_does_not_meet_the_client_while_it_writes(access: Access) -> None:
    # It would be INTERNAL: a write of grpcio's client that fails takes the place of the status.
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with serving(access) as server, open_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        for _ in range(30):
            with pytest.raises(aio.AioRpcError) as caught:
                await stub.ServerReflectionInfo(iter([request]), timeout=60).read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_without_a_configuration_no_caller_needs_credentials() -> None:
    assert open_access(AuthConfig(), RULES, mutual_tls=False) is None


# Certificates.


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def own(authority: Authority, name: str, *uris: str, ca: Path | None = None, hours_left: float = 1) -> TlsConfig:
    pair = authority.issue(name, uris=uris, hours_left=hours_left)
    return TlsConfig(ca=ca or authority.ca, cert=pair.cert, key=pair.key)


def mutual(authority: Authority) -> AbstractAsyncContextManager[Server]:
    return serving(Access(RULES), own(authority, "server"))


async def test_a_certificate_says_who_calls(authority: Authority) -> None:
    async with mutual(authority) as server:
        assert await ask(server, tls=own(authority, "c", "baton://client/carol")) == "client:carol"


async def test_a_certificate_of_the_wrong_role_is_denied(authority: Authority) -> None:
    async with mutual(authority) as server:
        assert await ask(server, tls=own(authority, "w", "baton://worker/w1")) == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["spiffe://example.org/client"],
        ["baton://root/carol"],
        ["baton://client/"],
        ["baton://client/a/b"],
        ["baton://client/carol?x"],
        ["baton://client/carol", "baton://operator/carol"],
    ],
    ids=["none", "foreign", "no role", "no name", "path", "query", "two"],
)
async def test_a_certificate_that_does_not_say_one_role_and_name_is_unauthenticated(
    authority: Authority, uris: list[str]
) -> None:
    async with mutual(authority) as server:
        assert await ask(server, tls=own(authority, "c", *uris)) == "UNAUTHENTICATED"


async def test_a_foreign_uri_beside_ours_does_no_harm(authority: Authority) -> None:
    async with mutual(authority) as server:
        uris = ("spiffe://example.org/x", "baton://client/carol")
        assert await ask(server, tls=own(authority, "c", *uris)) == "client:carol"


async def test_a_name_that_looks_like_a_uri_in_the_subject_counts_for_nothing(authority: Authority) -> None:
    async with mutual(authority) as server:
        pair = authority.issue("subject", "baton.client.carol")
        tls = TlsConfig(ca=authority.ca, cert=pair.cert, key=pair.key)
        assert await ask(server, tls=tls) == "UNAUTHENTICATED"


async def test_an_expired_certificate_gets_no_connection(authority: Authority) -> None:
    async with mutual(authority) as server:
        tls = own(authority, "c", "baton://client/carol", hours_left=-1)
        assert await ask(server, tls=tls) == "UNAVAILABLE"


async def test_a_certificate_of_another_authority_gets_no_connection(authority: Authority, tmp_path: Path) -> None:
    async with mutual(authority) as server:
        other = Authority(tmp_path, "other")
        assert await ask(server, tls=own(other, "c", "baton://client/carol", ca=authority.ca)) == "UNAVAILABLE"


async def test_no_certificate_gets_no_connection(authority: Authority) -> None:
    async with mutual(authority) as server:
        assert await ask(server, tls=TlsConfig(ca=authority.ca)) == "UNAVAILABLE"


async def test_a_token_counts_before_the_certificate(authority: Authority, tokens_file: Path) -> None:
    """A proxy has a certificate of its own, and passes on what its clients send."""
    access = Access(RULES, read_tokens(tokens_file))
    async with serving(access, own(authority, "server")) as server:
        proxy = own(authority, "p", "baton://operator/proxy")
        assert await ask(server, tls=proxy, metadata=bearer(ALICE)) == "client:alice"
        assert await ask(server, "GetModel", tls=proxy) == "OK"
        assert await ask(server, "GetModel", tls=proxy, metadata=bearer("wrong")) == "UNAUTHENTICATED"


async def test_a_channel_can_expect_another_name_than_the_address(authority: Authority) -> None:
    pair = authority.issue("server", "workers.baton")
    async with serving(None, TlsConfig(cert=pair.cert, key=pair.key)) as server:
        right = TlsConfig(ca=authority.ca, server_name="workers.baton")
        assert await ask(server, "GetModel", tls=right) == "OK"
        wrong = TlsConfig(ca=authority.ca, server_name="routers.baton")
        assert await ask(server, "GetModel", tls=wrong) == "UNAVAILABLE"


# What the files may say.


def test_our_own_certificate_says_who_we_are(authority: Authority) -> None:
    assert own(authority, "w", "baton://worker/w1").identity == "baton://worker/w1"
    assert own(authority, "w").identity == ""


def test_a_certificate_of_our_own_that_has_expired_is_a_config_error(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="expired"):
        assert own(authority, "w", "baton://worker/w1", hours_left=-1).identity


def test_a_key_of_another_certificate_is_a_config_error(authority: Authority) -> None:
    one, two = authority.issue("one"), authority.issue("two")
    with pytest.raises(ConfigError, match="cannot be used"):
        assert TlsConfig(cert=one.cert, key=two.key).identity


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tokens: []", "at least 1"),
        ("tokens: [{name: a, token: short}]", "at least 20 characters"),
        ("tokens: [{name: a}]", "either token or sha256"),
        ("tokens: [{name: a, sha256: abc}]", "64 hexadecimal"),
        ("tokens: [{name: 'a b', token: alice-0123456789abcdef}]", "pattern"),
        ("tokens: [{name: a, role: root, token: alice-0123456789abcdef}]", "role"),
        (
            "tokens: [{name: a, token: alice-0123456789abcdef}, {name: b, token: alice-0123456789abcdef}]",
            "same token",
        ),
    ],
)
def test_a_tokens_file_that_is_wrong_is_a_config_error_without_secrets(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_tokens(path)
    assert ALICE not in str(caught.value)


def test_no_representation_shows_a_token(access: Access, tokens_file: Path) -> None:
    assert access.tokens is not None
    shown = f"{access!r} {vars(access.tokens)!r}"
    assert ALICE not in shown
    assert ADMIN not in shown


# Limits of connections.


async def test_a_request_over_the_limit_is_refused() -> None:
    async with serving(None, limits=ConnectionLimits(max_message_bytes=1024)) as server:
        async with open_channel(server.address) as channel:
            call = channel.unary_unary(f"/{NAME}/GetModel", request_serializer=bytes)
            with pytest.raises(aio.AioRpcError) as caught:
                await call(b"x" * 2048, timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_old_connection_is_renewed_without_an_error() -> None:
    async with (
        serving(None, limits=ConnectionLimits(max_age_seconds=0.2)) as server,
        open_channel(server.address) as channel,
    ):
        call = channel.unary_unary(f"/{NAME}/GetModel", request_serializer=bytes)
        for _ in range(20):
            await call(b"", timeout=60)
            await asyncio.sleep(0.05)
