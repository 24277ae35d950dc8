"""A certificate authority for one test, and what it signs for 127.0.0.1."""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rpc.auth.tls import TlsConfig


@dataclass(frozen=True, slots=True)
class Pair:
    """Two PEM files that belong together."""

    cert: Path
    key: Path


class Authority:
    """A self-signed authority; its certificate is the file `ca`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign(name, self._key, authority=True)
        self.ca = self._write(f"{name}-ca.pem", self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *hosts: str, uris: Sequence[str] = (), hours_left: float = 1) -> Pair:
        """A certificate for `name` at 127.0.0.1, for `hosts` and `uris`, for servers and for clients."""
        key = ec.generate_private_key(ec.SECP256R1())
        others = [*map(x509.DNSName, hosts), *map(x509.UniformResourceIdentifier, uris)]
        certificate = self._sign(name, key, authority=False, others=others, hours_left=hours_left)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Pair(
            self._write(f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM)),
            self._write(f"{name}-key.pem", private),
        )

    def _sign(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        *,
        authority: bool,
        others: Sequence[x509.GeneralName] = (),
        hours_left: float = 1,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *others]
        issuer = self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=2))
            .not_valid_after(now + datetime.timedelta(hours=hours_left))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            # Python's ssl insists on these since 3.13.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
            .add_extension(_usage(authority), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, name: str, content: bytes) -> Path:
        path = self._folder / name
        path.write_bytes(content)
        return path


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def worker_tls(folder: Path, name: str = "w1") -> TlsConfig:
    """The certificate with which a worker listens and calls, signed by an authority of its own."""
    authority = Authority(folder, f"authority of {name}")
    pair = authority.issue(name, uris=[f"baton://worker/{name}"])
    return TlsConfig(ca=authority.ca, cert=pair.cert, key=pair.key)
