"""The roles of workers: one declaration each, from which services, routers and the command line derive theirs.

Another distribution adds a role by an entry point of the group `baton.roles`, whose object is a RoleKind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from baton.errors import ConfigError

ENTRY_POINTS = "baton.roles"
LANGUAGE_MODEL = "language_model"

Role: TypeAlias = str


@dataclass(frozen=True, slots=True)
class ClientService:
    """A gRPC service of routers, by its full name; `router` is the `module:function` that makes it, given the
    RequestPath.
    """

    name: str
    router: str


@dataclass(frozen=True, slots=True)
class RoleKind:
    """A role, its gRPC service by its full name, and the stage that its calls begin with.

    `stage` is the name of a value of `baton.inference.v1.Stage`: the command line reads roles without stubs. `engine`
    is the part of an engine that serves the role; the one with a block pool is LANGUAGE_MODEL. A worker of a role that
    `completes` requests makes a model ready. `worker` is the `module:function` that opens the service on a worker,
    given its WorkerParts. A role that the InferenceService does not have has `client_services` of its own on routers.
    `fault_points` are those of docs/faults.md; by default the role's name.
    """

    name: Role
    service: str
    stage: str
    engine: str
    worker: str
    client_services: tuple[ClientService, ...] = ()
    completes: bool = False
    fault_points: tuple[str, ...] = ()

    @property
    def has_kv(self) -> bool:
        """True if its engine is a language model with a block pool; one engine serves all such roles of a worker."""
        return self.engine == LANGUAGE_MODEL

    @property
    def points(self) -> tuple[str, ...]:
        """The points of a call at which faults can be injected."""
        return self.fault_points or (self.name,)


_BUILT_IN = (
    RoleKind(
        "encode", "baton.engine.v1.EncodeService", "STAGE_ENCODE", "encoder", "services.roles.encode:open_service"
    ),
    RoleKind(
        "prefill",
        "baton.engine.v1.PrefillService",
        "STAGE_PREFILL_COMPUTE",
        LANGUAGE_MODEL,
        "services.roles.prefill:open_service",
        fault_points=("borrow", "lent", "borrowed", "prefill", "held"),
    ),
    RoleKind(
        "decode",
        "baton.engine.v1.DecodeService",
        "STAGE_DECODE",
        LANGUAGE_MODEL,
        "services.roles.decode:open_service",
        completes=True,
        fault_points=("early", "reserve", "pull", "confirm", "decode", "lend", "warm", "yield"),
    ),
    RoleKind(
        "embed",
        "baton.engine.v1.EmbedService",
        "STAGE_EMBED",
        "embedder",
        "services.roles.embed:open_service",
        completes=True,
    ),
    RoleKind(
        "diffuse",
        "baton.engine.v1.DiffuseService",
        "STAGE_DIFFUSE",
        "diffuser",
        "services.roles.diffuse:open_service",
        completes=True,
        client_services=(
            ClientService("baton.inference.v1.ImageService", "router.drawing.service:images"),
            ClientService("baton.inference.v1.VideoService", "router.drawing.service:videos"),
        ),
    ),
)


@cache
def role_kinds() -> Mapping[Role, RoleKind]:
    """All roles by name, those of other distributions last. Raises ConfigError for an entry that is not a new role."""
    kinds = {kind.name: kind for kind in _BUILT_IN}
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            kind = entry.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"role {entry.name!r} cannot be loaded: {error}") from error
        if not isinstance(kind, RoleKind) or kind.name != entry.name or kind.name in kinds:
            raise ConfigError(f"role {entry.name!r}: {entry.value} is not the RoleKind of a new role of this name")
        kinds[kind.name] = kind
    return kinds


def load(name: str) -> Any:
    """Returns the function that `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


@cache
def roles() -> tuple[Role, ...]:
    """The names of all roles."""
    return tuple(role_kinds())


@cache
def completing() -> frozenset[Role]:
    """The roles on whose workers requests end."""
    return frozenset(kind.name for kind in role_kinds().values() if kind.completes)


@cache
def with_kv() -> frozenset[Role]:
    """The roles whose engine is a language model."""
    return frozenset(kind.name for kind in role_kinds().values() if kind.has_kv)
