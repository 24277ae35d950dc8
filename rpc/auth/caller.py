"""The caller of a call: a name and a role, proven by a certificate or a token."""

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from baton.errors import Unauthenticated

Role = Literal["client", "worker", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)

BATON_SCHEME = "baton://"
"""What an identity in a certificate begins with: `baton://ROLE/NAME`."""

_URI = re.compile(rf"baton://({'|'.join(ROLES)})/([A-Za-z0-9._~-]{{1,128}})")


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `certificate` is the URI in its certificate; empty if a token identified it."""

    name: str
    role: Role
    certificate: str = ""


_CURRENT: ContextVar[Caller | None] = ContextVar("caller", default=None)


current_caller: Final = _CURRENT.get
"""The caller of the call that this task serves; None if callers need no credentials."""


def certificate() -> str:
    """The URI in the caller's certificate; empty if there is none."""
    caller = _CURRENT.get()
    return caller.certificate if caller else ""


def set_caller(caller: Caller) -> None:
    """Records the caller of the call that this task serves."""
    _CURRENT.set(caller)


def caller_of(auth_context: Mapping[str, Iterable[bytes]]) -> Caller | None:
    """The caller that a verified certificate names, by a URI `baton://ROLE/NAME` in its subject alternative names.

    None without a verified certificate. Raises Unauthenticated if the certificate has no such URI, or several.
    """
    if "x509_pem_cert" not in auth_context:
        return None
    return parse_identity([uri.decode("utf-8", "replace") for uri in auth_context.get("peer_uri", ())])


def parse_identity(uris: Iterable[str]) -> Caller:
    """The one caller that these URIs name. Raises Unauthenticated."""
    ours = [uri for uri in uris if uri.startswith(BATON_SCHEME)]
    if len(ours) != 1:
        raise Unauthenticated(f"the certificate has {len(ours)} URIs baton://ROLE/NAME; exactly one is required")
    match = _URI.fullmatch(ours[0])
    if match is None:
        raise Unauthenticated(f"the certificate's URI must be baton://ROLE/NAME, ROLE one of {', '.join(ROLES)}")
    return Caller(match[2], cast("Role", match[1]), certificate=ours[0])
