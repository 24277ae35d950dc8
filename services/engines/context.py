"""The base of engine configurations, and what a worker passes to its engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import Field

from runtime.config import Section
from services.engines.memory.allocation import UNSHARED, AllocationRules
from services.keeper.client import KeeperClient


class EngineConfig(Section):
    """The key `engine`. Each kind of engine has a subclass, with its own `kind` and its own keys."""

    kind: str

    @property
    def allows_fault_injection(self) -> bool:
        """True if requests may contain fault plans."""
        return False

    @property
    def is_follower(self) -> bool:
        """True if this process only computes for the engine of another one, which is the worker."""
        return False

    def why_not_kept(self, *, weights: bool, kv: bool) -> str:
        """The reason that `weights` or `kv` cannot outlive its process, with its key; empty if they can."""
        del weights, kv
        return f"engine.kind: the engine {self.kind} keeps neither weights nor KV"

    def max_node_ids(self, roles: Sequence[str]) -> int:
        """Returns how many workers of a namespace may have node ids; 0 if this engine needs none. See
        EngineContext.node.
        """
        del roles
        return 0


class ExternalEngineConfig(EngineConfig):
    """The keys that the engines of other packages have in common; a subclass has the typed section `args`."""

    model: Path = Field(description="A folder in Hugging Face's checkpoint layout. Nothing is ever downloaded.")
    name: str = Field(default="", description="The name under which it is served; the folder's name if empty.")
    extra_engine_args: Path | None = Field(default=None, description="A YAML file, such as in deploy/engine_configs.")
    override_engine_args: str = Field(default="", description="A JSON object.")
    max_waiting: int = Field(default=256, ge=1, description="Requests that may wait beyond a full batch.")
    slow_reader_seconds: float = Field(
        default=30.0, gt=0, description="An answer that is not read for this long is aborted."
    )
    canary_seconds: float | None = Field(
        default=5.0,
        gt=0,
        description="A hung engine is NOT_SERVING within this time: it is asked for a token after half of it without "
        "progress, and recovers if it answers after all; null never asks.",
    )


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """The memory that outlives the engine's process, and the keeper that holds it; with `standby` the next process is
    started ahead, and takes memory of its own.
    """

    keeper: KeeperClient
    weights: bool
    kv: bool
    standby: bool = False


class RankProgress(Protocol):
    """The progress that a rank above 0 reports to its process, from any thread."""

    @property
    def is_ready(self) -> bool:
        """True if `ready` has been called."""

    def loaded(self, seconds: float) -> None:
        """Its part of the model is loaded."""

    def ready(self) -> None:
        """Its group is ready."""

    def stepped(self, tokens: int) -> None:
        """A step with so many tokens, padding included, has been started."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """`node` returns the current node id of this worker, which is unique in the namespace; None without node ids."""

    roles: Sequence[str] = ("prefill", "decode")
    lease_seconds: float = 0.0
    node: Callable[[], int] | None = None
    allocation: AllocationRules = UNSHARED
    log_level: str = "info"  # debug, info, warning, error
    kept: KeptMemory | None = None
