"""What an engine is: the Protocols that every engine fulfils, and the values that pass between it and the services.

An engine never imports grpc and knows nothing of text. Closing the generator of `decode`, or cancelling the task that
awaits `prefill` or `reserve`, is the abort; it is done when the blocks are back. tests/contract/ is the definition.
"""

import enum
import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, runtime_checkable


class FinishReason(enum.Enum):
    """Why an engine ended a request; stop strings are the router's."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Media:
    """A medium that has been checked: whole, within the limits, and of its MIME type. `content` is the file."""

    content: bytes
    mime_type: str


@dataclass(frozen=True, slots=True)
class Embedding:
    """What the language model reads in place of a medium: `data` are the rows `[tokens, hidden size]`, little endian.

    Equal digests are equal embeddings: they are of the content, the encoder's weights and the processor.
    """

    digest: bytes
    shape: tuple[int, int]
    dtype: str  # numpy's or torch's name, such as float32, bfloat16
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Placeholder ids `start:start + num_tokens` of a prompt, for which an embedding stands.

    Without it the prompt's KV can be pulled, but not computed.
    """

    start: int
    num_tokens: int
    digest: bytes
    embedding: Embedding | None = None

    @property
    def end(self) -> int:
        """The index after the last one."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids to continue. `emitted` are ids that the client already has: context, and counted as generated.

    `media` are in the order of their ids, and do not overlap.
    """

    token_ids: tuple[int, ...]
    emitted: tuple[int, ...] = ()
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    data_parallel_rank: int | None = None  # where it is to run; None leaves it to the engine

    @property
    def context(self) -> tuple[int, ...]:
        """All ids that precede the next token."""
        return self.token_ids + self.emitted

    @property
    def is_computable(self) -> bool:
        """Whether every medium's embedding is here."""
        return all(span.embedding is not None for span in self.media)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and when to end. Everything is resolved: nothing here is 'unset', except seed and logprobs.

    Noise is a function of (seed, position), so it crosses from prefill to decode and does not depend on the batch.
    Position counts from the start of the prompt. A request without a seed is given a random one by the router.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token and of its likeliest rivals, before temperature, penalties and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """New ids, in order: one, or all that were waiting. `logprobs` is empty or as long as `ids`."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation. Seconds are of the engine's monotonic clock; prefill is 0 where the KV was pulled."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of a pool's blocks, `[blocks, layers, kv_factor, kv_heads, block_tokens, head_dim]`, and what fills it.

    Two pools may exchange blocks exactly if their digests are equal.
    """

    model: str  # fingerprint of the weights and configuration, not merely a name
    dtype: str  # numpy's or torch's name, such as float32, bfloat16
    num_layers: int
    kv_factor: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    block_bytes: int
    contract_version: int = 1

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 over all fields."""
        text = "\n".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
        return hashlib.sha256(text.encode()).hexdigest()


EMBEDDING_BLOCK_ROWS = 16
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


def embedding_bytes(shape: tuple[int, int], dtype: str) -> int | None:
    """What an embedding of this shape takes; None for a dtype that embeddings do not have."""
    width = _WIDTHS.get(dtype)
    return None if width is None else shape[0] * shape[1] * width


def embedding_layout(model: str, dtype: str, hidden_size: int) -> KvLayout:
    """The layout of pools of embeddings: a block is some rows, and in no way KV. `model` is the KV layout's."""
    return KvLayout(
        model=f"embeddings of {model}",
        dtype=dtype,
        num_layers=1,
        kv_factor=1,
        kv_heads=1,
        block_tokens=EMBEDDING_BLOCK_ROWS,
        head_dim=hidden_size,
        block_bytes=EMBEDDING_BLOCK_ROWS * hidden_size * _WIDTHS[dtype],
    )


class BlockMemory(Protocol):
    """A pool's memory, registered once and kept for the life of the process."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def file_descriptor(self) -> int | None:
        """An mmap-able file that is the pool (a memfd), or None where the pool is not in host memory."""

    def read(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """The blocks' bytes, in order; neighbouring ids share one view. Copies only if the pool is not in host memory.

        Blocking; call it in a thread. Ids are checked by the caller.
        """

    def write(self, block_ids: Sequence[int]) -> "BlockWriter":
        """Opens blocks that the caller has reserved for writing, in a thread of the caller's choice."""


class BlockWriter(Protocol):
    """Where pulled bytes go. `views` are writable, in the order of the ids, neighbours merged; `commit` ends it."""

    @property
    def views(self) -> Sequence[memoryview]: ...

    def commit(self) -> None:
        """Makes the bytes the pool's: nothing to do in host memory, a copy to the device elsewhere. Blocking."""


class HeldBlocks(Protocol):
    """Blocks of a pool in somebody's hands, until `release`, which is idempotent and quick."""

    @property
    def block_ids(self) -> tuple[int, ...]: ...

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks are for."""

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were back already."""


class HeldKv(Protocol):
    """A prompt's KV cache and first token. The holder owns the blocks until `release`, which is idempotent and quick.

    If `finish_reason` is set, the first token ended the request and there are no blocks.
    """

    @property
    def first_token(self) -> int: ...

    @property
    def logprob(self) -> TokenLogprob | None: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def block_ids(self) -> tuple[int, ...]: ...

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is in the blocks: the whole context of the prompt, without the first token."""

    @property
    def prefix_hash(self) -> bytes: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def queue_seconds(self) -> float: ...

    @property
    def compute_seconds(self) -> float: ...

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were back already."""


class Reservation(Protocol):
    """Blocks on the decode side, for `num_tokens` tokens of KV to be pulled.

    The first `cached_blocks` of them hold the right KV already, from this worker's own prefix cache, and must not be
    written. The caller owns it until it is given to `decode` in a PulledKv, or until `release`.
    """

    @property
    def block_ids(self) -> tuple[int, ...]: ...

    @property
    def cached_blocks(self) -> int: ...

    async def release(self) -> int:
        """Gives the blocks back; returns how many, 0 if they were back already, or if decode took them over.

        Must not be called while a transfer may still write into them.
        """


@dataclass(frozen=True, slots=True)
class PulledKv:
    """A prompt whose KV has arrived and been confirmed. `prompt.emitted` is at least the handoff's first token."""

    prompt: Prompt
    reservation: Reservation


@runtime_checkable
class MovingKv(HeldKv, Protocol):
    """Held KV that engines move themselves: no blocks of a pool, but a state that the other side's engine reads."""

    @property
    def engine_state(self) -> bytes: ...

    def fetched(self) -> None:
        """The other side has all of it: `release` then has nothing to call off. Called at most once, before it."""


@dataclass(frozen=True, slots=True)
class HandedKv:
    """A prompt whose KV an engine is to fetch by itself. `prompt.emitted` is at least the handoff's first token.

    `state` came off the wire; `num_tokens` is how many tokens of the context the KV is of.
    """

    prompt: Prompt
    num_tokens: int
    state: bytes = field(repr=False)


@runtime_checkable
class MovesKv(Protocol):
    """An engine that fetches KV from another one itself, and holds KV as MovingKv."""

    @property
    def fetch_seconds(self) -> float:
        """For how long after a prefill somebody may still be reading its KV; memory must not go before that."""

    async def take_over(self, source: HandedKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        """Returns once the KV is here; then it is as after `decode`.

        Raises InvalidRequest for a state that cannot be right, LayoutMismatch for one of another version, Overloaded
        before anything was fetched, and HandoffLost if the KV does not come.
        """


@dataclass(frozen=True, slots=True)
class KvStored:
    """Blocks that the prefix cache of a data-parallel rank holds from now on, by the hash chain of their prompts."""

    rank: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """Blocks that it holds no more."""

    rank: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All that it is known to hold; replaces what was told before."""

    rank: int
    block_hashes: tuple[bytes, ...]


KvChange = KvStored | KvRemoved | KvSnapshot


@runtime_checkable
class TellsKv(Protocol):
    """An engine that says what its prefix cache holds."""

    def kv_changes(self) -> AsyncGenerator[KvChange, None]:
        """Snapshots first, one for each rank, and then changes, without end. Raises Unsupported where it is off."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine is busy with. `blocks_used` includes `blocks_held`, and not what is merely cached."""

    running: int
    waiting: int
    waiting_prefill_tokens: int
    blocks_total: int
    blocks_used: int
    blocks_held: int


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a router needs to turn text into ids and back. `tokenizer_json` is empty where there is no vocabulary."""

    tokenizer_json: bytes
    tokenizer_config_json: str
    chat_template: str


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How images stand in a prompt: `placeholder` in text, its id once for each row of the image's embedding.

    `tokens_per_image` is how many rows every image has, 0 if that differs; a row has `hidden_size` numbers of
    `embedding_layout`'s dtype. `encoder_fingerprint` is empty where nothing encodes.
    """

    placeholder: str
    placeholder_token_id: int
    tokens_per_image: int
    hidden_size: int
    embedding_layout: KvLayout
    encoder_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine serves and within which limits."""

    name: str
    engine: str  # pytorch, simulated, trtllm
    max_context_tokens: int
    vocab_size: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]
    layout: KvLayout
    files: ModelFiles
    load_seconds: float
    images: ImageRules | None = None  # of a model without media
    data_parallel_ranks: int = 1  # copies of the model inside the engine, each with a cache of its own


@dataclass(frozen=True, slots=True)
class EncoderLoad:
    """What an encoder is busy with, in media."""

    running: int
    waiting: int


class EncodeEngine(Protocol):
    """Turns media into embeddings."""

    async def encode(self, media: Sequence[Media]) -> Sequence[Embedding]:
        """One embedding for each medium, in order. Cancelling it drops those that have not begun."""


class Encoder(EncodeEngine, Protocol):
    """A model's eyes in one process. An async context manager: entering loads and warms up, leaving frees.

    Raises: InvalidRequest for a medium that cannot be read, Overloaded when the bounded queue is full, EngineFailed
    when computing fails. A fatal error makes every later call raise EngineFailed and `healthy` false.
    """

    @property
    def facts(self) -> ModelFacts:
        """Of the model; `layout` is that of embeddings, and `images.encoder_fingerprint` is set.

        It is of weights, processor and its version: encoders of one fingerprint make equal embeddings of a medium.
        """

    @property
    def healthy(self) -> bool: ...

    def load(self) -> EncoderLoad:
        """Cheap and safe to call from the event loop at any time."""


class PrefillEngine(Protocol):
    """Runs prompts and holds their KV."""

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> HeldKv:
        """Computes the KV of `prompt.context`, samples one token, and holds the blocks."""


class DecodeEngine(Protocol):
    """Runs requests to their end, from pulled KV or from the prompt."""

    async def reserve(self, prompt: Prompt, num_tokens: int) -> Reservation:
        """Blocks for a pull of `num_tokens` tokens. Waits for room as long as the caller does."""

    def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        """Generates until the end; the last item is Finished, once. Never yields ids of `emitted` again.

        Takes the reservation over, also when it raises. Each item carries all ids that were waiting.
        """


class Engine(PrefillEngine, DecodeEngine, Protocol):
    """One model in one process. An async context manager: entering loads and warms up, leaving frees.

        async with PyTorchEngine(config) as engine: ...

    Raises: InvalidRequest for a prompt that can never fit, Overloaded when a bounded queue is full, EngineFailed when
    computing fails. A fatal error makes every later call raise EngineFailed and `healthy` false.
    """

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def memory(self) -> BlockMemory: ...

    @property
    def healthy(self) -> bool: ...

    def load(self) -> EngineLoad:
        """Cheap and safe to call from the event loop at any time."""
