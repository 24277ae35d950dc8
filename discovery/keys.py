"""The registry's keys: `/baton/<namespace>/workers/<id>`, the same for routers, and `.../numbers/<kind>/<id>`."""

import re
from typing import Literal

from baton.errors import ConfigError

Group = Literal["workers", "routers"]

# No slash: with one, a namespace could contain another's keys.
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,200}")


class WorkerKeys:
    """The keys of one namespace. Raises ConfigError for a namespace that cannot be part of a key."""

    def __init__(self, namespace: str, group: Group = "workers") -> None:
        self.namespace = namespace
        self._namespace = f"/baton/{_checked('namespace', namespace)}"
        self.prefix = f"{self._namespace}/{group}/".encode()
        self.end = end_of(self.prefix)

    def ids(self, kind: str) -> bytes:
        """The prefix of the keys of one kind of allocated ids. Raises ConfigError if `kind` cannot be part of a key."""
        return f"{self._namespace}/numbers/{_checked('kind', kind)}/".encode()

    def of(self, worker_id: str) -> bytes:
        """The key of a worker. Raises ConfigError if its id cannot be part of a key."""
        return self.prefix + _checked("worker_id", worker_id).encode()


def end_of(prefix: bytes) -> bytes:
    """The end of the range of keys with this prefix, which ends in a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _checked(what: str, name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{what}: {name!r:.100} must be 1 to 200 letters, digits, dots, colons, dashes or underscores"
        )
    return name
