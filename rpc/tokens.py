"""Bearer tokens: a file of names, roles and secrets, and who a token belongs to."""

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, SecretStr, model_validator
from typing_extensions import Self

from rpc.caller import Caller, Role
from rpc.config import Section, load
from rpc.errors import ConfigError, Unauthenticated

# Guessing must be out of the question: there is no other limit on tries.
_SHORTEST = 20


class TokenEntry(Section):
    """One token: as it is, or as the hexadecimal SHA-256 of it, so that the file gives nothing away."""

    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._~-]+$")
    role: Role = "client"
    token: SecretStr | None = None
    sha256: SecretStr | None = None

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.token is None) == (self.sha256 is None):
            raise ValueError("give one of token and sha256")
        if self.token is not None and len(self.token.get_secret_value()) < _SHORTEST:
            raise ValueError(f"a token has at least {_SHORTEST} characters")
        if self.sha256 is not None and not _is_digest(self.sha256.get_secret_value()):
            raise ValueError("sha256 is not 64 hexadecimal digits")
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


class Tokens:
    """Every token that is accepted."""

    def __init__(self, file: TokensFile) -> None:
        self._known = [_Known(entry.digest, Caller(entry.name, entry.role)) for entry in file.tokens]

    def caller_of(self, token: str) -> Caller:
        """Whose token it is. Takes as long for a wrong one as for a right one. Raises Unauthenticated."""
        digest = _digest(token)
        found: Caller | None = None
        for known in self._known:
            if hmac.compare_digest(known.digest, digest):
                found = known.caller
        if found is None:
            raise Unauthenticated("the token is not valid")
        return found


def read_tokens(path: Path) -> Tokens:
    """The tokens of a file. Raises ConfigError naming what is wrong, and never what is secret."""
    file = load(TokensFile, path).value
    digests = [entry.digest for entry in file.tokens]
    if len(set(digests)) < len(digests):
        raise ConfigError(f"{path}: tokens: two entries have the same token")
    return Tokens(file)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in text)
