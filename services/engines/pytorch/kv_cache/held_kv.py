"""Held blocks: a prefill, a decode that has yielded, a loan of one that goes on, and a reservation for a pull."""

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial

from runtime.aio import wait_until_done
from services.engines.answer import FinishReason, FromTiers, PromptLogprobs, TokenLogprob
from services.engines.kv import HeldKv, LentKv, Reservation
from services.engines.prompt import Retained
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine_loop import EngineLoop
from services.engines.pytorch.sequence import Held, TokenSequence
from services.engines.pytorch.steps.loans import LentBlocks
from services.engines.pytorch.steps.tier_loads import BlockReservation


class HeldPrompt(HeldKv):
    """A computed prompt, or one with a part of its answer, with its blocks."""

    __slots__ = ("_held", "_loop", "_sequence")

    def __init__(self, loop: EngineLoop, sequence: TokenSequence, held: Held) -> None:
        self._loop = loop
        self._sequence = sequence
        self._held = held

    @property
    def first_token(self) -> int:
        """The sampled id."""
        return self._held.first_token

    @property
    def logprob(self) -> TokenLogprob | None:
        """Its log probabilities, if they were requested."""
        return self._held.logprob

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt, if they were requested."""
        return self._held.prompt_logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set if the first token ended the request."""
        return self._held.finish_reason

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks in the order of the tokens."""
        return self._held.block_ids

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose KV is in the blocks."""
        return self._held.num_tokens

    @property
    def prefix_hash(self) -> bytes:
        """The hash chain's value after the full blocks."""
        return self._held.prefix_hash

    @property
    def cached_tokens(self) -> int:
        """The number of tokens that came from the prefix cache."""
        return self._held.cached_tokens

    @property
    def retained(self) -> Retained | None:
        """The beginning of the prompt that stays in the prefix cache."""
        return self._held.retained

    @property
    def from_tiers(self) -> FromTiers:
        """Of the cached tokens, those that were loaded from tiers below the pool."""
        return self._held.from_tiers

    @property
    def queue_seconds(self) -> float:
        """The time from arrival to the first step."""
        return self._held.queue_seconds

    @property
    def compute_seconds(self) -> float:
        """The time from the first step to the first token."""
        return self._held.compute_seconds

    async def release(self) -> int:
        """Frees the blocks; returns how many, 0 if they were free already."""
        return await self._loop.run_shielded(lambda core: core.abort(self._sequence))


class Loan(LentKv):
    """Blocks of a decode that goes on, or of the prefix cache."""

    __slots__ = ("_is_over", "_lent", "_loop")

    def __init__(self, loop: EngineLoop, lent: LentBlocks) -> None:
        self._loop = loop
        self._lent = lent
        self._is_over = False

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks in the order of the tokens."""
        return self._lent.block_ids

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose KV is in the blocks, which are full."""
        return self._lent.num_tokens

    @property
    def next_token(self) -> int:
        """The id that follows them."""
        return self._lent.next_token

    @property
    def prefix_hash(self) -> bytes:
        """The hash chain's value after them."""
        return self._lent.prefix_hash

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were given back already."""
        if self._is_over:
            return 0
        self._is_over = True
        return await self._loop.run_shielded(lambda core: core.scheduler.loans.give_back(self._lent))


async def lend(loop: EngineLoop, holding: Awaitable[LentBlocks | None]) -> Loan | None:
    """The blocks that `holding` holds on the engine's thread, if any; a cancellation gives them back."""
    lending = asyncio.ensure_future(holding)
    try:
        lent = await asyncio.shield(lending)
    except asyncio.CancelledError:
        await wait_until_done(lending)
        if not lending.exception() and (lost := lending.result()) is not None:
            await Loan(loop, lost).release()
        raise
    return None if lent is None else Loan(loop, lent)


async def hold_prefix(loop: EngineLoop, hashes: Sequence[bytes]) -> LentBlocks | None:
    """Holds the blocks of a chain that the pool has, and copies of those in host memory."""
    lent: asyncio.Future[LentBlocks | None] = asyncio.get_running_loop().create_future()

    def begin(core: EngineCore) -> None:
        core.scheduler.loans.lend_all(hashes, lambda found: loop.notify(partial(lent.set_result, found)))

    await loop.call(begin)
    return await lent


class ReservedBlocks(Reservation):
    """Blocks that a pull may write."""

    __slots__ = ("_loop", "blocks")

    def __init__(self, loop: EngineLoop, blocks: BlockReservation) -> None:
        self._loop = loop
        self.blocks = blocks

    @property
    def block_ids(self) -> Sequence[int]:
        """The blocks in the order of the tokens."""
        return self.blocks.granted_ids

    @property
    def cached_blocks(self) -> int:
        """The number of blocks, from the first on, that already contain their KV."""
        return self.blocks.cached_blocks

    async def release(self) -> int:
        """Frees the blocks; returns how many, 0 if they were free already, or if `decode` took them over."""
        return await self._loop.run_shielded(lambda core: core.abort(self.blocks))

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The names of the full blocks."""
        return self.blocks.hashes

    async def cache(self, num_blocks: int) -> None:
        """Frees the blocks; the prefix cache keeps the full ones of the first `num_blocks`, which have their KV."""
        await self._loop.run_shielded(lambda core: core.cache(self.blocks, num_blocks))
