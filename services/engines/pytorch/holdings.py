"""Blocks in somebody's hands: a held prefill, and a reservation for a pull."""

from services.answer import FinishReason, TokenLogprob
from services.engines.pytorch.engine_loop import EngineLoop
from services.engines.pytorch.scheduler import BlockReservation
from services.engines.pytorch.sequence import Held, TokenSequence
from services.kv import HeldKv, Reservation


class HeldPrompt(HeldKv):
    """A prompt that has been run, with its blocks."""

    __slots__ = ("_held", "_loop", "_sequence")

    def __init__(self, loop: EngineLoop, sequence: TokenSequence, held: Held) -> None:
        self._loop = loop
        self._sequence = sequence
        self._held = held

    @property
    def first_token(self) -> int:
        """The id that was sampled."""
        return self._held.first_token

    @property
    def logprob(self) -> TokenLogprob | None:
        """Its report, if log probabilities were asked for."""
        return self._held.logprob

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set if the first token ended the request."""
        return self._held.finish_reason

    @property
    def block_ids(self) -> tuple[int, ...]:
        """In the order of the tokens."""
        return self._held.block_ids

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is in the blocks."""
        return self._held.num_tokens

    @property
    def prefix_hash(self) -> bytes:
        """The hash chain's value over the full blocks."""
        return self._held.prefix_hash

    @property
    def cached_tokens(self) -> int:
        """Tokens that the prefix cache spared."""
        return self._held.cached_tokens

    @property
    def queue_seconds(self) -> float:
        """From arrival to the first step."""
        return self._held.queue_seconds

    @property
    def compute_seconds(self) -> float:
        """From the first step to the first token."""
        return self._held.compute_seconds

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were back already."""
        return await self._loop.settle(lambda core: core.abort(self._sequence))


class ReservedBlocks(Reservation):
    """Blocks that a pull may write to."""

    __slots__ = ("_loop", "blocks")

    def __init__(self, loop: EngineLoop, blocks: BlockReservation) -> None:
        self._loop = loop
        self.blocks = blocks

    @property
    def block_ids(self) -> tuple[int, ...]:
        """In the order of the tokens."""
        return self.blocks.granted_ids

    @property
    def cached_blocks(self) -> int:
        """How many of them, from the first on, hold the right KV already."""
        return self.blocks.cached_blocks

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were back already, or if decode took them over."""
        return await self._loop.settle(lambda core: core.abort(self.blocks))
