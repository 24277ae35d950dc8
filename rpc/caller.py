"""Who calls: a name and a role, proven by a certificate or by a token."""

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, cast, get_args

from rpc.errors import Unauthenticated

Role = Literal["client", "worker", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)

_URI = re.compile(rf"baton://({'|'.join(ROLES)})/([A-Za-z0-9._~-]{{1,128}})")


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody whose name is proven. `certificate` is the URI in its certificate; empty of one known by a token."""

    name: str
    role: Role
    certificate: str = ""


_CURRENT: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current_caller() -> Caller | None:
    """Whose call this task answers; None where nobody has to prove who he is."""
    return _CURRENT.get()


def certificate() -> str:
    """The URI in the certificate of whose call this task answers; empty where there is none."""
    caller = _CURRENT.get()
    return caller.certificate if caller else ""


def note_caller(caller: Caller) -> None:
    """Says whose call this task answers."""
    _CURRENT.set(caller)


def caller_of(auth_context: Mapping[str, Iterable[bytes]]) -> Caller | None:
    """Who presented a certificate of ours: `baton://ROLE/NAME` among the URIs of its subject alternative names.

    None without a verified certificate. Raises Unauthenticated if the certificate says nothing of us, or two things.
    """
    if "x509_pem_cert" not in auth_context:
        return None
    return parse_identity([uri.decode("utf-8", "replace") for uri in auth_context.get("peer_uri", ())])


def parse_identity(uris: Iterable[str]) -> Caller:
    """The one caller that these URIs name. Raises Unauthenticated."""
    ours = [uri for uri in uris if uri.startswith("baton://")]
    if len(ours) != 1:
        raise Unauthenticated(f"the certificate has {len(ours)} URIs baton://ROLE/NAME, and needs one")
    match = _URI.fullmatch(ours[0])
    if match is None:
        raise Unauthenticated(f"the certificate's URI must be baton://ROLE/NAME, ROLE one of {', '.join(ROLES)}")
    return Caller(match[2], cast("Role", match[1]), certificate=ours[0])
