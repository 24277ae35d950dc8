"""Authentication at etcd: users and passwords, renewed tokens, and TLS."""

import datetime
import ipaddress
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.eventually import eventually
from support.router.worker_views import Views, worker
from support.servers.etcd import EtcdServer

from baton.errors import PermissionDenied, Unauthenticated, Unavailable
from discovery.etcd import EtcdRegistry

OpenEtcd = Callable[..., AbstractAsyncContextManager[EtcdRegistry]]

ROOT = "--user=root:open sesame"
LOGIN = {"username": "baton", "password": "secret"}


@pytest.fixture
def guarded_etcd(own_etcd: EtcdServer, namespace: str) -> EtcdServer:
    """An etcd whose user `baton` may use the test's namespace only."""
    own_etcd.control("user", "add", "root:open sesame")
    own_etcd.control("user", "grant-role", "root", "root")
    own_etcd.control("user", "add", "baton:secret")
    own_etcd.control("role", "add", "workers")
    own_etcd.control(
        "role", "grant-permission", "workers", "--prefix=true", "readwrite", f"/baton/{namespace}/workers/"
    )
    own_etcd.control("user", "grant-role", "baton", "workers")
    own_etcd.control("auth", "enable")
    return own_etcd


async def test_a_user_with_the_right_password_registers_and_watches(
    guarded_etcd: EtcdServer, open_etcd: OpenEtcd
) -> None:
    async with (
        open_etcd(guarded_etcd.endpoint, **LOGIN) as registry,
        registry.register(worker("w1")),
        Views(registry) as views,
    ):
        await views.until_ids("w1")


async def test_a_wrong_password_is_refused_at_once(guarded_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    async with open_etcd(guarded_etcd.endpoint, username="baton", password="guess") as registry:
        with pytest.raises(Unauthenticated, match="baton"):
            await registry.register(worker("w1")).__aenter__()
        with pytest.raises(Unauthenticated, match="baton"):
            await anext(registry.watch())


async def test_no_password_is_refused_at_once(guarded_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    async with open_etcd(guarded_etcd.endpoint) as registry:
        with pytest.raises(Unauthenticated, match="a user and a password"):
            await registry.register(worker("w1")).__aenter__()


async def test_another_namespace_is_refused_at_once(guarded_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    guarded_etcd.control(ROOT, "user", "add", "stranger:secret")
    async with open_etcd(guarded_etcd.endpoint, username="stranger", password="secret") as registry:
        with pytest.raises(PermissionDenied):
            await registry.register(worker("w1")).__aenter__()
        with pytest.raises(PermissionDenied):
            await anext(registry.watch())


async def test_a_token_that_etcd_forgot_is_renewed(
    guarded_etcd: EtcdServer, open_etcd: OpenEtcd, namespace: str
) -> None:
    async with (
        open_etcd(guarded_etcd.endpoint, **LOGIN) as registry,
        registry.register(worker("w1")),
        Views(registry) as views,
    ):
        await views.until_ids("w1")
        guarded_etcd.control(ROOT, "auth", "disable")
        guarded_etcd.control("auth", "enable")
        async with registry.register(worker("w2")):
            await views.until_ids("w1", "w2")
        key = f"/baton/{namespace}/workers/w1"
        guarded_etcd.control(ROOT, "del", key)
        await eventually(lambda: key in guarded_etcd.control(ROOT, "get", key))


async def test_a_change_of_users_does_not_end_a_registration(guarded_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    async with (
        open_etcd(guarded_etcd.endpoint, **LOGIN) as registry,
        registry.register(worker("w1")),
        Views(registry) as views,
    ):
        await views.until_ids("w1")
        guarded_etcd.control(ROOT, "user", "add", "somebody:else")
        async with registry.register(worker("w2")):
            await views.until_ids("w1", "w2")


async def test_a_password_does_no_harm_where_etcd_asks_for_none(shared_etcd: EtcdServer, open_etcd: OpenEtcd) -> None:
    async with open_etcd(shared_etcd.endpoint, **LOGIN) as registry, registry.register(worker("w1")) as registration:
        assert registration.registered


class Authority:
    """A certificate authority that writes what it issues into a folder, as PEM."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self.certificate = folder / "ca.crt"
        built = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), True)
        self._write(self.certificate, built)

    def issue(self, name: str) -> tuple[Path, Path]:
        """Certificate and key of 127.0.0.1, for servers and clients."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._builder(subject, key).add_extension(x509.SubjectAlternativeName([address]), False)
        certificate, key_file = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        self._write(certificate, built)
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        key_file.write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
        return certificate, key_file

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    def _write(self, path: Path, built: x509.CertificateBuilder) -> None:
        path.write_bytes(built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls_etcd(tmp_path: Path, authority: Authority) -> Iterator[EtcdServer]:
    """An etcd that asks its clients for certificates of the authority."""
    certificate, key = authority.issue("server")
    own = [f"--cert-file={certificate}", f"--key-file={key}"]
    clients = ["--client-cert-auth", f"--trusted-ca-file={authority.certificate}"]
    server = EtcdServer(tmp_path / "tls", scheme="https", arguments=[*own, *clients])
    server.start()
    yield server
    server.kill()


async def test_certificates_of_both_sides_are_presented(
    tls_etcd: EtcdServer, authority: Authority, open_etcd: OpenEtcd
) -> None:
    certificate, key = authority.issue("client")
    tls = {"ca": authority.certificate, "cert": certificate, "key": key}
    async with (
        open_etcd(f"https://{tls_etcd.endpoint}", tls=tls) as registry,
        registry.register(worker("w1")),
        Views(registry) as views,
    ):
        await views.until_ids("w1")


async def test_an_etcd_of_another_authority_is_not_trusted(
    tls_etcd: EtcdServer, authority: Authority, open_etcd: OpenEtcd, tmp_path: Path
) -> None:
    certificate, key = authority.issue("client")
    (tmp_path / "other").mkdir()
    tls = {"ca": Authority(tmp_path / "other").certificate, "cert": certificate, "key": key}
    async with open_etcd(tls_etcd.endpoint, tls=tls, start_timeout_seconds=1.0) as registry:
        with pytest.raises(Unavailable, match="certificate"):
            await registry.register(worker("w1")).__aenter__()


async def test_a_client_without_a_certificate_is_not_let_in(
    tls_etcd: EtcdServer, authority: Authority, open_etcd: OpenEtcd
) -> None:
    tls = {"ca": authority.certificate}
    async with open_etcd(tls_etcd.endpoint, tls=tls, start_timeout_seconds=1.0) as registry:
        with pytest.raises(Unavailable):
            await registry.register(worker("w1")).__aenter__()
