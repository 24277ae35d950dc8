"""The engine itself, as its thread uses it: model, pool and scheduler, and what happens to a request in between."""

import secrets
import time

import torch

from rpc.errors import BatonError, ConfigError, EngineFailed, HandoffLost, InvalidRequest
from services.answer import FinishReason
from services.engine import EngineLoad, ModelFacts
from services.engines.pytorch import checkpoint
from services.engines.pytorch.batch import Chunk, KvCache
from services.engines.pytorch.blocks import BlockPool, CacheListener
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.memory import DTYPES, DeviceMemory, HostMemory, open_memory
from services.engines.pytorch.model import LoadedModel, load_model
from services.engines.pytorch.prefix import HashChain
from services.engines.pytorch.runner import Runner
from services.engines.pytorch.sampling import Chosen, SamplerState
from services.engines.pytorch.scheduler import BlockReservation, Limits, Scheduler
from services.engines.pytorch.sequence import Event, Failed, Held, Sink, State, Token, TokenSequence
from services.kv import KvLayout
from services.prompt import Prompt, Sampling

_HOST_CACHE_BYTES = 256 << 20
_DEFAULT_BLOCK_TOKENS = {"cpu": 16, "cuda": 32}
_DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 4096}


class EngineCore:
    """Everything here runs on the engine's thread, between steps or in one."""

    def __init__(self, config: PyTorchConfig, listener: CacheListener | None = None) -> None:
        began = time.monotonic()
        model = load_model(config)
        self._layout = layout = _layout(config, model)
        num_blocks = _num_blocks(config, model, layout)
        self.device: str = model.device.type
        self.memory: HostMemory | DeviceMemory = open_memory(layout, num_blocks, model.device)
        self._pool = BlockPool(num_blocks, listener)
        self._prefix_cache = config.prefix_cache
        self._runner = Runner(model, KvCache(self.memory.tensor, layout))
        self.scheduler = Scheduler(self._pool, _limits(config, model, layout))
        self._held: set[TokenSequence] = set()
        self.eos_token_ids = frozenset(model.eos_token_ids)
        self._max_context_tokens = min(model.shape.max_context_tokens, self._pool.total * layout.block_tokens)
        self._warm_up()
        self.facts = ModelFacts(
            name=config.served_name,
            engine="pytorch",
            max_context_tokens=self._max_context_tokens,
            vocab_size=model.shape.vocab_size,
            max_logprobs=min(config.max_logprobs, model.shape.vocab_size),
            eos_token_ids=model.eos_token_ids,
            layout=layout,
            files=checkpoint.model_files(config.model),
            load_seconds=time.monotonic() - began,
            images=model.images,
        )

    def new_sequence(self, prompt: Prompt, sampling: Sampling, sink: Sink, *, hold: bool) -> TokenSequence:
        """A request that has not been submitted yet. Safe on every thread."""
        return TokenSequence(
            prompt=prompt,
            sampling=sampling,
            hold=hold,
            chain=HashChain(prompt.cache_salt, self._layout.block_tokens, prompt.media),
            sampler=SamplerState(prompt, sampling, self.eos_token_ids),
            sink=sink,
            tokens=list(prompt.context),
        )

    def submit(self, sequence: TokenSequence) -> None:
        """Queues a request whose prompt is run here. Raises Overloaded."""
        if not self._ended_already(sequence):
            self.scheduler.enqueue(sequence)

    def submit_pulled(self, sequence: TokenSequence, reservation: BlockReservation) -> None:
        """Lets a request run on the blocks of its reservation, which hold the right KV by now."""
        if reservation.state is not State.RESERVED:
            raise HandoffLost("the reservation was given back before the request could run")
        if sequence.prompt.emitted == () or reservation.num_tokens >= len(sequence.tokens):
            raise InvalidRequest.of("emitted", "must hold at least the token that follows the pulled ones")
        sequence.computed = reservation.num_tokens
        sequence.cached_tokens = reservation.cached_blocks * self.facts.layout.block_tokens
        sequence.started = time.monotonic()
        sequence.pulled = True
        if self._ended_already(sequence):
            self.scheduler.remove(reservation)
            return
        self.scheduler.take_over(reservation, sequence)
        self._store(sequence)

    def reserve(self, reservation: BlockReservation) -> None:
        """Queues a wish for blocks. Raises Overloaded."""
        self.scheduler.enqueue(reservation)

    def abort(self, item: TokenSequence | BlockReservation) -> int:
        """Ends a request or reservation in whatever state; returns how many blocks came back."""
        if isinstance(item, TokenSequence):
            self._held.discard(item)
        return self.scheduler.remove(item)

    def step(self) -> bool:
        """Runs one step; False if there was nothing to do."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return self._make_way()
        for chunk, chosen in self._runner.run(chunks):
            self._advance(chunk, chosen)
        return True

    def _make_way(self) -> bool:
        """Where all that run wait for a block, and none could be run again here: ends the newest of them.

        Unless somebody else has blocks, who will give them back: then there is nothing to do but to wait.
        """
        stuck = {block for sequence in self.scheduler.running for block in sequence.blocks}
        if not stuck or self._pool.used > len(stuck):
            return False
        sequence = self.scheduler.running[-1]
        self.abort(sequence)
        sequence.sink(
            Failed(HandoffLost("its blocks were needed, and without the embeddings it cannot be run again here"))
        )
        return True

    def fail_all(self, error: BatonError) -> None:
        """Ends every request that somebody waits for with `error`."""
        for item in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(item)
            if isinstance(item, TokenSequence):
                item.sink(Failed(error))
            else:
                item.settled(error)

    def load(self) -> EngineLoad:
        """A snapshot."""
        waiting = [item for item in self.scheduler.waiting if isinstance(item, TokenSequence)]
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            waiting_prefill_tokens=sum(s.remaining for s in [*waiting, *self.scheduler.running] if s.remaining > 1),
            blocks_total=self._pool.total,
            blocks_used=self._pool.used,
            blocks_held=sum(len(sequence.blocks) for sequence in self._held),
        )

    def _advance(self, chunk: Chunk, chosen: Chosen | None) -> None:
        sequence = chunk.sequence
        if chosen is not None and chosen.token_id is None:
            self._fail(sequence)
            return
        sequence.computed = chunk.end
        self._store(sequence)
        if chosen is not None and chosen.token_id is not None:
            self._append(sequence, chosen.token_id, chosen)

    def _append(self, sequence: TokenSequence, token_id: int, chosen: Chosen) -> None:
        sequence.tokens.append(token_id)
        sequence.sampler.append(token_id)
        sequence.first_token_at = sequence.first_token_at or time.monotonic()
        reason = sequence.finish_reason(self.eos_token_ids, self._max_context_tokens)
        if sequence.hold:
            self._hold(sequence, chosen, reason)
            return
        sequence.sink(Token(token_id, chosen.logprob))
        if reason is not None:
            self.abort(sequence)
            sequence.sink(sequence.finished(reason))

    def _hold(self, sequence: TokenSequence, chosen: Chosen, reason: FinishReason | None) -> None:
        if reason is None:
            self.scheduler.hold(sequence)
            self._held.add(sequence)
        else:
            self.abort(sequence)
        num_tokens = sequence.computed
        sequence.sink(
            Held(
                first_token=sequence.tokens[-1],
                logprob=chosen.logprob,
                finish_reason=reason,
                block_ids=tuple(sequence.blocks),
                num_tokens=num_tokens,
                prefix_hash=sequence.chain.value(sequence.tokens, num_tokens),
                cached_tokens=sequence.cached_tokens,
                queue_seconds=sequence.queue_seconds,
                compute_seconds=sequence.first_token_at - sequence.started,
            )
        )

    def _ended_already(self, sequence: TokenSequence) -> bool:
        """Whether the ids that the client has already are the whole answer; then that is said at once."""
        if not sequence.prompt.emitted:
            return False
        reason = sequence.finish_reason(self.eos_token_ids, self._max_context_tokens)
        if reason is not None:
            sequence.state = State.DONE
            sequence.sink(sequence.finished(reason))
        return reason is not None

    def _store(self, sequence: TokenSequence) -> None:
        """Makes the sequence's newly filled blocks known to the prefix cache."""
        if not self._prefix_cache:
            return
        links = sequence.chain.upto(sequence.tokens, sequence.computed)
        for index in range(sequence.stored_blocks, len(links)):
            self._pool.store(sequence.blocks[index], links[index])
        sequence.stored_blocks = len(links)

    def _fail(self, sequence: TokenSequence) -> None:
        """Ends one request whose numbers overflowed, and cleans its blocks: NaN survives even under a mask."""
        self.memory.tensor[self._pool.forget(sequence.blocks)] = 0
        self.abort(sequence)
        sequence.sink(Failed(EngineFailed("the model computed NaN or infinity for this request")))

    def _warm_up(self) -> None:
        """Runs a short prompt and some tokens, so that the first request finds everything in place."""
        outcome: list[Event] = []
        prompt = Prompt((0,) * min(32, self._max_context_tokens - 1), cache_salt=secrets.token_hex())
        sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
        self.submit(self.new_sequence(prompt, sampling, outcome.append, hold=False))
        while self.step():
            pass
        self._pool.clear_cache()
        if isinstance(outcome[-1], Failed):
            raise outcome[-1].error


def _layout(config: PyTorchConfig, model: LoadedModel) -> KvLayout:
    shape = model.shape
    block_tokens = config.block_tokens or _DEFAULT_BLOCK_TOKENS[model.device.type]
    return KvLayout(
        model=checkpoint.fingerprint(config.model),
        dtype=next(name for name, dtype in DTYPES.items() if dtype == model.dtype),
        num_layers=shape.num_layers,
        kv_factor=2,
        kv_heads=shape.kv_heads,
        block_tokens=block_tokens,
        head_dim=shape.head_dim,
        block_bytes=shape.num_layers * 2 * shape.kv_heads * block_tokens * shape.head_dim * model.dtype.itemsize,
    )


def _num_blocks(config: PyTorchConfig, model: LoadedModel, layout: KvLayout) -> int:
    """How many blocks the cache's share of memory holds, one of them for padding."""
    size = config.kv_cache_bytes or _HOST_CACHE_BYTES
    if config.kv_cache_bytes is None and model.device.type == "cuda":
        size = int(torch.cuda.mem_get_info(model.device)[0] * config.kv_cache_fraction)
    count = size // layout.block_bytes
    if count < 2:
        raise ConfigError(f"engine.kv_cache_bytes: {size} bytes are less than two blocks of {layout.block_bytes} bytes")
    return int(count)


def _limits(config: PyTorchConfig, model: LoadedModel, layout: KvLayout) -> Limits:
    step_tokens = config.max_step_tokens or max(_DEFAULT_STEP_TOKENS[model.device.type], 2 * config.max_sequences)
    return Limits(
        max_sequences=config.max_sequences,
        max_step_tokens=step_tokens,
        max_waiting=config.max_waiting,
        block_tokens=layout.block_tokens,
        prefix_cache=config.prefix_cache,
    )
