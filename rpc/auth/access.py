"""Authentication and authorization: how callers identify themselves, and which roles may call a method.

Bearer tokens: a file of names, roles and secrets.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field, SecretStr, model_validator
from typing_extensions import Self

from baton.errors import ConfigError, PermissionDenied, Unauthenticated
from rpc.auth.caller import ROLES, Caller, Role, caller_of
from runtime.config import Section, load

# Nothing limits the number of attempts, so a token must be too long to guess.
_MIN_CHARACTERS = 20


class TokenEntry(Section):
    """One token, or its SHA-256 in hexadecimal, which keeps the token out of the file."""

    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._~-]+$")
    role: Role = "client"
    token: SecretStr | None = None
    sha256: SecretStr | None = None

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.token is None) == (self.sha256 is None):
            raise ValueError("give either token or sha256")
        if self.token is not None and len(self.token.get_secret_value()) < _MIN_CHARACTERS:
            raise ValueError(f"a token must have at least {_MIN_CHARACTERS} characters")
        if self.sha256 is not None and not _is_digest(self.sha256.get_secret_value()):
            raise ValueError("sha256 must be 64 hexadecimal digits")
        return self

    @property
    def digest(self) -> bytes:
        """SHA-256 of the token."""
        if self.token is not None:
            return _digest(self.token.get_secret_value())
        assert self.sha256 is not None
        return bytes.fromhex(self.sha256.get_secret_value())


class TokensFile(Section):
    """The file that `auth.tokens_file` names."""

    tokens: tuple[TokenEntry, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes = field(repr=False)
    caller: Caller


class TokenTable:
    """The accepted tokens."""

    def __init__(self, file: TokensFile) -> None:
        self._known = [_Known(entry.digest, Caller(entry.name, entry.role)) for entry in file.tokens]

    def caller_of(self, token: str) -> Caller:
        """The caller with this token. Takes equally long for a wrong token. Raises Unauthenticated."""
        digest = _digest(token)
        found: Caller | None = None
        for known in self._known:
            if hmac.compare_digest(known.digest, digest):
                found = known.caller
        if found is None:
            raise Unauthenticated("the token is not valid")
        return found


def read_tokens(path: Path) -> TokenTable:
    """Reads a tokens file. Raises ConfigError, whose message never contains a secret."""
    file = load(TokensFile, path).value
    digests = [entry.digest for entry in file.tokens]
    if len(set(digests)) < len(digests):
        raise ConfigError(f"{path}: tokens: two entries have the same token")
    return TokenTable(file)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in text)


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
        """The reason why the caller may not call the method; None if it may."""
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
