"""Which roles may call which methods of a router, where callers have to say who they are."""

from rpc.access import Rules
from rpc.caller import Role

_OPERATOR: frozenset[Role] = frozenset({"operator"})
_CLIENT_OR_OPERATOR: frozenset[Role] = frozenset({"client", "operator"})

RULES: Rules = {
    "/baton.inference.v1.InferenceService/": _CLIENT_OR_OPERATOR,
    "/baton.inference.v1.ClusterService/": _OPERATOR,
}
