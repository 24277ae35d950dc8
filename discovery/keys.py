"""Where in the registry a namespace's workers are: `/baton/<namespace>/workers/<worker_id>`."""

import re

from rpc.errors import ConfigError

# No slash: a namespace could reach into another's workers with it.
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,200}")


class WorkerKeys:
    """The keys of one namespace's workers. Raises ConfigError for a name that cannot be a part of a key."""

    def __init__(self, namespace: str) -> None:
        self.prefix = f"/baton/{_checked('namespace', namespace)}/workers/".encode()
        # The first key behind all that begin with the prefix, which ends in a slash.
        self.end = self.prefix[:-1] + bytes([self.prefix[-1] + 1])

    def of(self, worker_id: str) -> bytes:
        """The key of a worker. Raises ConfigError if its id cannot be a part of a key."""
        return self.prefix + _checked("worker_id", worker_id).encode()


def _checked(what: str, name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{what}: {name!r:.100} is not 1 to 200 letters, digits, dots, colons, dashes, underscores")
    return name
