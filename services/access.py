"""Which roles may call which methods of a worker, where mutual TLS says who calls."""

from rpc.access import Rules
from rpc.caller import Role

_WORKER: frozenset[Role] = frozenset({"worker"})
_OPERATOR: frozenset[Role] = frozenset({"operator"})
_BOTH = _WORKER | _OPERATOR

# Routers and workers are one role: both are the inside of a cluster. Clients reach routers only.
RULES: Rules = {
    "/baton.engine.v1.": _WORKER,
    "/baton.engine.v1.HandoffService/List": _BOTH,
    "/baton.engine.v1.WorkerService/Abort": _BOTH,
    "/baton.engine.v1.WorkerService/Drain": _OPERATOR,
    "/baton.engine.v1.WorkerService/GetLoad": _BOTH,
    "/baton.engine.v1.WorkerService/GetModel": _BOTH,
    "/baton.engine.v1.WorkerService/WatchLoad": _BOTH,
}
