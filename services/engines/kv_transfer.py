"""The Protocols of engines that transfer KV to one another themselves."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from services.engines.kv import HeldBlocks, HeldKv
from services.engines.prompt import Prompt, Sampling
from services.engines.running.generation import Generation


@runtime_checkable
class EngineHeldKv(HeldKv, Protocol):
    """Held KV that engines transfer themselves. It has no blocks of a pool, but a state for the reader's engine."""

    @property
    def engine_state(self) -> bytes: ...

    def fetched(self) -> None:
        """Notes that the reader has all of it, so that `release` need not cancel a transfer. Called at most once,
        before `release`.
        """


@runtime_checkable
class ConfirmsKv(EngineHeldKv, Protocol):
    """Held KV that the engine may free by itself, and without an error for a reader that comes too late."""

    @property
    def is_held(self) -> bool:
        """True if the engine is certain to hold it now; a lease on KV that it may have freed is not renewed."""

    async def was_held(self) -> bool:
        """True if the engine has held it until its reader had all of it. Asked once, before `release`."""


class EngineDestination(HeldBlocks, Protocol):
    """Blocks that a decode engine has allocated for KV that does not exist yet. Their holder owns them until `release`,
    or until it passes them to `decode_remote`. Released blocks are not given out while a sender may still write.
    """

    @property
    def engine_state(self) -> bytes:
        """For `prefill_into` of the other engine: where the KV goes, and in which room."""


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """A prompt whose KV an engine fetches itself. `prompt.emitted` is at least the handoff's first token.

    `state` comes from the wire. `num_tokens` is the number of tokens of the context that the KV is for.
    """

    prompt: Prompt
    num_tokens: int
    state: bytes = field(repr=False)
    destination: "EngineDestination | None" = None  # of an engine that allocates first, which then owns it


class TransfersKv(Protocol):
    """An engine that fetches KV from another engine itself, and holds KV as EngineHeldKv."""

    @property
    def fetch_seconds(self) -> float:
        """The seconds after a prefill during which a reader may still read its KV; the memory stays until then."""

    async def decode_remote(self, source: RemoteKv, sampling: Sampling) -> Generation:
        """Fetches the KV, and returns the generation that follows.

        Raises InvalidRequest for an invalid state, LayoutMismatch for a state of another version, Overloaded before
        anything is fetched, and HandoffLost if the KV does not arrive. Takes ownership of `source.destination`, also
        when it raises.
        """


@runtime_checkable
class AllocatesFirst(TransfersKv, Protocol):
    """An engine whose decode side allocates before the prefill side computes, which then sends as it computes."""

    async def allocate(self, prompt: Prompt, sampling: Sampling, prefill_address: str) -> EngineDestination:
        """Allocates the blocks of a prompt. `prefill_address` is the `host:port` of the worker that will compute it.

        Cancelling it frees them. Raises Overloaded if there is no room.
        """

    async def prefill_into(self, prompt: Prompt, sampling: Sampling, destination: bytes) -> EngineHeldKv:
        """Computes a prompt as `prefill` does, for KV that goes to a destination. Its state comes from the wire.

        Cancelling it ends the sending. Raises InvalidRequest for an invalid state, and HandoffLost once the other side
        does not wait for it any more.
        """
