"""The embedded engine's face: asynchronous calls into the engine's thread, and their abort."""

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import torch
from typing_extensions import Self

from rpc.errors import BatonError, InvalidRequest
from services.answer import Finished, Tokens
from services.engine import EngineLoad, ModelFacts
from services.engines.media_checks import check_computable
from services.engines.pytorch.blocks import CacheListener
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.core import EngineCore
from services.engines.pytorch.engine_loop import EngineLoop
from services.engines.pytorch.holdings import HeldPrompt, ReservedBlocks
from services.engines.pytorch.mailbox import Mailbox
from services.engines.pytorch.prefix import HashChain
from services.engines.pytorch.pulse import Pulse
from services.engines.pytorch.requests import check_prompt, check_sampling
from services.engines.pytorch.scheduler import BlockReservation
from services.engines.pytorch.sequence import Event, Failed, Held, TokenSequence
from services.engines.pytorch.stream import DecodeStream
from services.footprint import Footprint, current_footprint
from services.kv import BlockMemory, HeldKv, PulledKv
from services.prompt import Prompt, Sampling


class PyTorchEngine:
    """A Hugging Face model with a paged KV cache and continuous batching, as `services.engine.Engine` describes it.

    `listener` hears, on the engine's thread, of blocks that enter and leave the prefix cache.
    """

    def __init__(self, config: PyTorchConfig, listener: CacheListener | None = None) -> None:
        self._config = config
        self._listener = listener

    async def __aenter__(self) -> Self:
        self._core = await asyncio.to_thread(self._build)
        self._loop = EngineLoop(self._core, self._config.threads, Pulse(self._core.device, self._config.stall_seconds))
        await self._loop.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._loop.__aexit__(*exc)
        self._core.memory.close()

    @property
    def facts(self) -> ModelFacts:
        """What is served, and within which limits."""
        return self._core.facts

    @property
    def memory(self) -> BlockMemory:
        """The block pool's memory."""
        return self._core.memory

    @property
    def healthy(self) -> bool:
        """False after a failure that no request survives."""
        return self._loop.healthy

    def load(self) -> EngineLoad:
        """As of the end of the last step."""
        return self._loop.load

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> HeldKv:
        """Computes the KV of `prompt.context`, samples one token, and holds the blocks."""
        check_prompt(prompt, self.facts)
        check_computable(prompt)
        check_sampling(sampling, self.facts)
        if len(prompt.context) >= self.facts.max_context_tokens or len(prompt.emitted) >= sampling.max_tokens:
            raise InvalidRequest.of("emitted", "leaves no token to be generated")
        mailbox = Mailbox()
        sequence = self._sequence(prompt, sampling, mailbox, hold=True)
        try:
            await self._loop.call(lambda core: core.submit(sequence))
            [event] = await mailbox.take()
        except asyncio.CancelledError:
            await self._loop.settle(partial(_abort, current_footprint(), sequence))
            raise
        return self._held(sequence, event)

    async def reserve(self, prompt: Prompt, num_tokens: int) -> ReservedBlocks:
        """Blocks for a pull of `num_tokens` tokens of `prompt.context`. Waits for room as long as the caller does."""
        check_prompt(prompt, self.facts)
        if not 0 < num_tokens <= len(prompt.context):
            raise InvalidRequest.of("handoff.num_tokens", f"must be 1 to {len(prompt.context)}, as the prompt has")
        if num_tokens >= self.facts.max_context_tokens:
            raise InvalidRequest.of("prompt", f"leaves no room for an answer within {self.facts.max_context_tokens}")
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        chain = HashChain(prompt.cache_salt, self.facts.layout.block_tokens, prompt.media)
        hashes = chain.upto(prompt.context, num_tokens)

        def settled(error: BatonError | None) -> None:
            self._loop.notify(partial(_settle, granted, error))

        blocks = BlockReservation(num_tokens, hashes, settled)
        try:
            await self._loop.call(lambda core: core.reserve(blocks))
            await granted
        except asyncio.CancelledError:
            await self._loop.settle(lambda core: core.abort(blocks))
            raise
        return ReservedBlocks(self._loop, blocks)

    def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        """Generates until the end. Takes the reservation over, also when it raises."""
        mailbox = Mailbox()
        prompt = source if isinstance(source, Prompt) else source.prompt
        sequence = self._sequence(prompt, sampling, mailbox, hold=False)

        def submit(core: EngineCore) -> None:
            check_prompt(prompt, core.facts)
            check_sampling(sampling, core.facts)
            if isinstance(source, PulledKv):
                core.submit_pulled(sequence, _blocks(source))
            else:
                check_computable(prompt)
                core.submit(sequence)

        footprint = current_footprint()

        def abort(core: EngineCore) -> int:
            blocks = _abort(footprint, sequence, core)
            return blocks + (core.abort(_blocks(source)) if isinstance(source, PulledKv) else 0)

        return DecodeStream(self._loop, mailbox, submit, abort)

    def _build(self) -> EngineCore:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        with torch.inference_mode():
            return EngineCore(self._config, self._listener)

    def _sequence(self, prompt: Prompt, sampling: Sampling, mailbox: Mailbox, *, hold: bool) -> TokenSequence:
        def sink(event: Event) -> None:
            self._loop.notify(partial(mailbox.put, event))

        return self._core.new_sequence(prompt, sampling, sink, hold=hold)

    def _held(self, sequence: TokenSequence, event: Event) -> HeldPrompt:
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Held)
        return HeldPrompt(self._loop, sequence, event)


def _settle(granted: "asyncio.Future[None]", error: BatonError | None) -> None:
    if granted.done():
        return
    if error is None:
        granted.set_result(None)
    else:
        granted.set_exception(error)


def _abort(footprint: Footprint, sequence: TokenSequence, core: EngineCore) -> int:
    tokens = sequence.computed
    blocks = core.abort(sequence)
    footprint.give_back(tokens, blocks)
    return blocks


def _blocks(source: PulledKv) -> BlockReservation:
    assert isinstance(source.reservation, ReservedBlocks)
    return source.reservation.blocks
