"""The roles of workers: one declaration each, from which services, routers and the command line derive theirs.

A new role is an entry here and in `Role`, a service in services/ with its engine in worker_engines.py, what calls it in
router/, and a number of its workers in `Model` and in the options of `baton up`. tests/discovery/test_roles.py names
what is missing.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from baton.inference.v1 import timing_pb2

Role: TypeAlias = Literal["encode", "prefill", "decode", "embed"]


@dataclass(frozen=True, slots=True)
class RoleKind:
    """A role: its gRPC service in baton.engine.v1, and the stage that its calls begin with.

    A worker of a role that `completes` requests makes a model ready. `has_kv` are those whose engine is a language
    model with a block pool; one engine serves all of them.
    """

    name: Role
    service: str
    stage: "timing_pb2.Stage.ValueType"
    completes: bool = False
    has_kv: bool = False


ROLE_KINDS = (
    RoleKind("encode", "EncodeService", timing_pb2.STAGE_ENCODE),
    RoleKind("prefill", "PrefillService", timing_pb2.STAGE_PREFILL_COMPUTE, has_kv=True),
    RoleKind("decode", "DecodeService", timing_pb2.STAGE_DECODE, completes=True, has_kv=True),
    RoleKind("embed", "EmbedService", timing_pb2.STAGE_EMBED, completes=True),
)
ROLES: tuple[Role, ...] = get_args(Role)
COMPLETING: frozenset[str] = frozenset(kind.name for kind in ROLE_KINDS if kind.completes)
WITH_KV: frozenset[str] = frozenset(kind.name for kind in ROLE_KINDS if kind.has_kv)
