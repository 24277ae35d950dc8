"""Who may call what: how callers prove who they are, and which roles a method is for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc import aio
from pydantic import Field

from rpc.caller import ROLES, Caller, Role, caller_of
from rpc.config import Section
from rpc.errors import PermissionDenied, Unauthenticated
from rpc.tokens import Tokens, read_tokens

HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection."
ANY_ROLE = frozenset(ROLES)

_BEARER = "bearer "

# The longest prefix of a method decides; a method without any is for nobody.
Rules = Mapping[str, frozenset[Role]]


class AuthConfig(Section):
    """The key `auth`: without it nobody has to say who he is, unless mutual TLS is on."""

    tokens_file: Path | None = Field(default=None, description="Names, roles and tokens; see docs/security.md.")
    open_health: bool = Field(default=True, description="Whether anybody may ask for the health, as probes do.")
    proxies: tuple[str, ...] = Field(
        default=(), description="Names of callers that speak for others: their x-baton-tenant is believed."
    )


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server. `tokens` are asked first; then the certificate counts."""

    rules: Rules
    tokens: Tokens | None = None
    open_health: bool = True

    def is_open(self, method: str) -> bool:
        """Whether anybody may call it."""
        return self.open_health and method.startswith(HEALTH)

    def roles(self, method: str) -> frozenset[Role]:
        """Whose method it is."""
        if method.startswith((HEALTH, REFLECTION)):
            return ANY_ROLE
        prefixes = [prefix for prefix in self.rules if method.startswith(prefix)]
        return self.rules[max(prefixes, key=len)] if prefixes else frozenset()

    def identify(self, context: "aio.ServicerContext[Any, Any]") -> Caller:
        """Who calls. Raises Unauthenticated."""
        if self.tokens is not None:
            token = _bearer(context.invocation_metadata() or ())
            if token is not None:
                return self.tokens.caller_of(token)
        caller = caller_of(context.auth_context())
        if caller is None:
            raise Unauthenticated("credentials are missing: send `authorization: Bearer TOKEN`, or a certificate")
        return caller


def require(caller: Caller, method: str, roles: frozenset[Role]) -> None:
    """Raises PermissionDenied unless the caller has one of the roles."""
    if caller.role not in roles:
        wanted = " or ".join(sorted(roles)) or "nobody"
        raise PermissionDenied(f"{method} is for {wanted}; {caller.name} is {caller.role}")


def open_access(auth: AuthConfig, rules: Rules, *, mutual_tls: bool) -> Access | None:
    """The access that a configuration asks for; None where nobody has to prove anything. Raises ConfigError."""
    if auth.tokens_file is None and not mutual_tls:
        return None
    tokens = read_tokens(auth.tokens_file) if auth.tokens_file else None
    return Access(rules, tokens, auth.open_health)


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token that was sent; None if there was none. Raises Unauthenticated for anything else."""
    sent = [value for key, value in metadata if key == "authorization"]
    if not sent:
        return None
    if len(sent) > 1 or not isinstance(sent[0], str) or not sent[0].lower().startswith(_BEARER):
        raise Unauthenticated("`authorization` must be sent once, as `Bearer TOKEN`")
    return sent[0][len(_BEARER) :].strip()
