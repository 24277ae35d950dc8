"""The Python client of Baton.

    from baton import Client

    with Client("127.0.0.1:7070") as client:
        print(client.generate("Sort: pear apple mango").text())

`AsyncClient` is the same for asyncio. Both raise subclasses of `BatonError`; `baton.errors` has all of them. The
messages of the API are in `baton.inference.v1`, such as `baton.inference.v1.generate_pb2.GenerateRequest`.

| module | subject |
|---|---|
| client, async_client | `Client` and `AsyncClient` |
| generation/ | the answers that they stream, which go on after a loss |
| requests, images | from arguments to messages |
| cluster_requests, drawing_requests | the same of operators' methods, and of those that draw |
| records | records of requests: digests, and bundles in files |
| enum_names | the values of enums in words |
| sampling_options | the numbers of sampling: one row each, from which all façades derive theirs |
| errors, error_details | the error classes; which one a failed call stands for |
| files | files that a user names, read within a limit |
| calls | calls on stubs that raise these errors |
| version | the version of the client, and of all of Baton |
| connection/ | `Tls`, `Retry`; channels, metadata and spans of calls |
| inference/, engine/, etcd/, kserve/, envoy/ | generated stubs: the API, the protocol of routers and workers, others' |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from baton.version import __version__

if TYPE_CHECKING:
    from baton.async_client import AsyncClient
    from baton.client import Client
    from baton.connection.credentials import Tls
    from baton.connection.retry import Resume, Retry
    from baton.errors import BatonError
    from baton.generation.asynchronous import AsyncGeneration
    from baton.generation.sync import Generation

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "BatonError",
    "Client",
    "Generation",
    "Resume",
    "Retry",
    "Tls",
    "__version__",
]

# Loaded when first used: a program that needs only errors or messages loads no channel.
_MODULES = {
    "AsyncClient": "baton.async_client",
    "AsyncGeneration": "baton.generation.asynchronous",
    "BatonError": "baton.errors",
    "Client": "baton.client",
    "Generation": "baton.generation.sync",
    "Resume": "baton.connection.retry",
    "Retry": "baton.connection.retry",
    "Tls": "baton.connection.credentials",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
