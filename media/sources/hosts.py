"""The hosts that a configuration allows, and the target of an `https:` URI."""

from dataclasses import dataclass
from urllib.parse import SplitResult

from baton.errors import InvalidRequest

HTTPS_PORT = 443


@dataclass(frozen=True, slots=True)
class HttpsTarget:
    """The target of a request: a host (a name, or an address without brackets), a port, and the path with its query."""

    host: str
    port: int
    path: str

    @classmethod
    def of(cls, parts: SplitResult, field: str) -> "HttpsTarget":
        """The target of an `https:` URI. Raises InvalidRequest."""
        if "@" in parts.netloc:
            raise InvalidRequest.of(field, "has a user name or password, which are not sent")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            raise InvalidRequest.of(field, "has no valid port") from None
        if not host or host.startswith("."):
            raise InvalidRequest.of(field, "has no host")
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        return cls(host.removesuffix("."), HTTPS_PORT if port is None else port, path)

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == HTTPS_PORT else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HostPattern:
    """An entry of `allowed_hosts`: a name, `*.` and a name for everything below it, or `*`; and one port."""

    name: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "HostPattern":
        """Reads an entry that MediaConfig has accepted."""
        host, port = text, ""
        if ":" in text.rpartition("]")[2]:
            host, _, port = text.rpartition(":")
        return cls(host.strip("[]").removesuffix("."), int(port or HTTPS_PORT))

    def matches(self, target: HttpsTarget) -> bool:
        """True if the pattern allows the target's host and port."""
        if target.port != self.port:
            return False
        if self.name == "*":
            return True
        if self.name.startswith("*."):
            return target.host.endswith(self.name[1:])
        return target.host == self.name
