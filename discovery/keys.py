"""Where in the registry things are: `/baton/<namespace>/workers/<worker_id>` and `.../numbers/<kind>/<number>`."""

import re

from rpc.errors import ConfigError

# No slash: a namespace could reach into another's workers with it.
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,200}")


class WorkerKeys:
    """The keys of one namespace's workers. Raises ConfigError for a name that cannot be a part of a key."""

    def __init__(self, namespace: str) -> None:
        self._namespace = f"/baton/{_checked('namespace', namespace)}"
        self.prefix = f"{self._namespace}/workers/".encode()
        self.end = end_of(self.prefix)

    def numbers(self, kind: str) -> bytes:
        """What the keys of the numbers of a kind begin with. Raises ConfigError if it cannot be a part of a key."""
        return f"{self._namespace}/numbers/{_checked('kind', kind)}/".encode()

    def of(self, worker_id: str) -> bytes:
        """The key of a worker. Raises ConfigError if its id cannot be a part of a key."""
        return self.prefix + _checked("worker_id", worker_id).encode()


def end_of(prefix: bytes) -> bytes:
    """The first key behind all that begin with the prefix, which ends in a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _checked(what: str, name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{what}: {name!r:.100} is not 1 to 200 letters, digits, dots, colons, dashes, underscores")
    return name
