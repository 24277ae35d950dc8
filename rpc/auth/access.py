"""Authentication and authorization: how callers identify themselves, and which roles may call a method."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from baton.errors import PermissionDenied, Unauthenticated
from rpc.auth.caller import ROLES, Caller, Role, caller_of
from rpc.auth.tokens import TokenTable, read_tokens
from runtime.config import Section

HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection."
ANY_ROLE = frozenset(ROLES)

_BEARER = "bearer "

# The roles by prefix of the method's name: the longest prefix decides, and a method without one is refused to all.
Rules = Mapping[str, frozenset[Role]]


class AuthConfig(Section):
    """The key `auth`. Without it callers need no credentials, unless mutual TLS is on."""

    tokens_file: Path | None = Field(default=None, description="Names, roles and tokens; see docs/security.md.")
    open_health: bool = Field(default=True, description="Whether health checks need no credentials.")
    proxies: tuple[str, ...] = Field(default=(), description="Names of callers whose x-baton-tenant is trusted.")


class Headers(Protocol):
    """A call, as far as its headers and its connection say who its caller is."""

    def invocation_metadata(self) -> Any:
        """The metadata that the caller sent."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """The identities that the caller has proven, by property."""


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server. A token identifies the caller; without one, its certificate does."""

    rules: Rules
    tokens: TokenTable | None = None
    open_health: bool = True

    def is_open(self, method: str) -> bool:
        """True if the method needs no credentials."""
        return self.open_health and method.startswith(HEALTH)

    def roles(self, method: str) -> frozenset[Role]:
        """The roles that may call the method."""
        if method.startswith((HEALTH, REFLECTION)):
            return ANY_ROLE
        prefixes = [prefix for prefix in self.rules if method.startswith(prefix)]
        return self.rules[max(prefixes, key=len)] if prefixes else frozenset()

    def identify(self, context: Headers) -> Caller:
        """The caller. Raises Unauthenticated."""
        if self.tokens is not None:
            token = _bearer(context.invocation_metadata() or ())
            if token is not None:
                return self.tokens.caller_of(token)
        caller = caller_of(context.auth_context())
        if caller is None:
            raise Unauthenticated("credentials are missing: send `authorization: Bearer TOKEN` or a certificate")
        return caller

    def refusal(self, method: str, context: Headers) -> Unauthenticated | PermissionDenied | None:
        """Why the caller may not call the method; None if it may."""
        if self.is_open(method):
            return None
        try:
            require(self.identify(context), method, self.roles(method))
        except (Unauthenticated, PermissionDenied) as error:
            return error.with_traceback(None)
        return None


def require(caller: Caller, method: str, roles: frozenset[Role]) -> None:
    """Raises PermissionDenied unless the caller has one of the roles."""
    if caller.role not in roles:
        wanted = " or ".join(sorted(roles)) or "no role"
        raise PermissionDenied(f"{method} requires the role {wanted}; {caller.name} has the role {caller.role}")


def open_access(auth: AuthConfig, rules: Rules, *, mutual_tls: bool) -> Access | None:
    """The configured access rules; None if callers need no credentials. Raises ConfigError."""
    if auth.tokens_file is None and not mutual_tls:
        return None
    tokens = read_tokens(auth.tokens_file) if auth.tokens_file else None
    return Access(rules, tokens, auth.open_health)


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token in the metadata; None if there is none. Raises Unauthenticated for a malformed header."""
    sent = [value for key, value in metadata if key == "authorization"]
    if not sent:
        return None
    if len(sent) > 1 or not isinstance(sent[0], str) or not sent[0].lower().startswith(_BEARER):
        raise Unauthenticated("`authorization` must be sent once, as `Bearer TOKEN`")
    return sent[0][len(_BEARER) :].strip()
