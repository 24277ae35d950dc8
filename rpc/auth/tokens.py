"""Bearer tokens: a file of names, roles and secrets."""

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, SecretStr, model_validator
from typing_extensions import Self

from baton.errors import ConfigError, Unauthenticated
from rpc.auth.caller import Caller, Role
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
