"""The Protocols of engines and encoders, their facts and their load.

An engine never imports grpc and never sees text. Close the generator of `decode`, or cancel the task that awaits
`prefill` or `reserve`, to abort a request: the abort has ended when the blocks are free again. The tests in
tests/services/engines/contract/ define what an engine must do.

The Protocol of embedders, which turn texts into vectors.
"""

import os
import signal
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy
from numpy.typing import NDArray
from typing_extensions import Self

from baton.errors import EngineFailed, Unsupported
from services.engines.answer import Finished, Tokens
from services.engines.journal.journal import Journal, RecoveredDecode
from services.engines.kv import BlockMemory, HeldBlocks, HeldKv, KvLayout, PulledKv, Reservation
from services.engines.kv_events import ReportsKvEvents
from services.engines.kv_transfer import TransfersKv
from services.engines.lora.inventory import ServesLoras
from services.engines.prompt import Embedding, Media, Prompt, Sampling
from services.engines.rules import DrawingRules, EmbeddingRules, ImageRules
from services.engines.running.generation import ClosingStream, Generation
from services.engines.seals import host_digests


@dataclass(frozen=True, slots=True)
class MemoryTiers:
    """The tiers below a pool, in blocks, and where the tokens of all prompts since the start were found."""

    host_total: int
    host_used: int
    disk_total: int
    disk_used: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine. `blocks_used` includes `blocks_held`; blocks that are only cached count as free.

    `empty_blocks` is how much of the used blocks has no token yet, in blocks: 0 if the engine does not say. A change of
    it alone, which each token is, is no other load.
    """

    running: int = 0
    waiting: int = 0
    waiting_prefill_tokens: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_held: int = 0
    empty_blocks: float = field(default=0.0, compare=False)
    memory: MemoryTiers | None = field(default=None, compare=False)
    # The tenants that retain most, as digests, and their blocks.
    retained: Sequence[tuple[bytes, int]] = field(default=(), compare=False)
    wake_seconds: float | None = None  # of a model that sleeps: until a request can run


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The tokenizer files that a router needs. `tokenizer_json` is empty if the model has no vocabulary."""

    tokenizer_json: bytes = b""
    tokenizer_config_json: str = ""
    chat_template: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model of an engine, and its limits."""

    name: str
    engine: str  # pytorch, simulated, trtllm
    max_context_tokens: int
    vocab_size: int
    layout: KvLayout
    max_logprobs: int = 0
    eos_token_ids: tuple[int, ...] = ()
    files: ModelFiles = ModelFiles()
    load_seconds: float = 0.0
    images: ImageRules | None = None  # of a model without media
    embedding: EmbeddingRules | None = None  # of an embedder only
    drawing: DrawingRules | None = None  # of a diffuser only
    settings: tuple[tuple[str, str], ...] = ()  # names and values as it runs, for people: max_sequences and the like
    prompt_logprobs: bool = False  # whether it reports log probabilities of prompts
    embeddings_only: bool = False  # whether the model cannot generate
    images_only: bool = False  # whether the model draws, and has nothing to do with text otherwise
    unsupported_sampling: tuple[str, ...] = ()  # fields of SamplingParams that requests may not use
    guided_decoding: bool = False
    takes_handoffs: bool = True  # whether `decode` accepts KV of other workers
    lora: bool = False  # whether requests may name adapters
    data_parallel_ranks: int = 1  # copies of the model inside the engine, each with a cache of its own


@dataclass(frozen=True, slots=True)
class EncoderLoad:
    """The load of a part of an engine: of an encoder in media, of others in calls."""

    running: int
    waiting: int


class EncodeEngine(Protocol):
    """Turns media into embeddings."""

    async def encode(self, media: Sequence[Media]) -> Sequence[Embedding]:
        """Returns one embedding for each medium, in order. Cancelling drops the media that have not begun."""


class EnginePart(Protocol):
    """The part of an engine that serves a role without KV, in one process.

    An async context manager: entering loads and warms up, leaving frees. Its calls raise Overloaded when the bounded
    queue is full, and EngineFailed when computing fails. After a fatal error every call raises EngineFailed, and
    `healthy` is false.
    """

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model."""

    @property
    def healthy(self) -> bool: ...

    @property
    def responsive(self) -> bool:
        """False also while it takes far longer to answer than usual: it should get no work until it answers."""

    def load(self) -> EncoderLoad:
        """Cheap and safe to call from the event loop at any time."""


class Encoder(EnginePart, EncodeEngine, Protocol):
    """A vision encoder. Raises InvalidRequest for a medium that cannot be decoded.

    In its facts `layout` is that of embeddings, and `images.encoder_fingerprint` is set. The fingerprint covers the
    weights, the processor and its version: encoders with the same fingerprint make equal embeddings of a medium.
    """


class PromptProgress(Protocol):
    """Is told, on the event loop, of a prompt that is computed in several steps."""

    def computed(self, block_ids: Sequence[int]) -> None:
        """These blocks, the next ones in the order of the tokens, have their final content, also for other readers."""

    def lost(self) -> None:
        """The prompt has lost all blocks named so far, and begins again: they may get other content."""


class ReportsProgress(Protocol):
    """An engine that tells which blocks of a prompt are computed while it computes the others."""

    async def prefill_reporting(self, prompt: Prompt, sampling: Sampling, progress: PromptProgress) -> HeldKv:
        """Computes a prompt as `prefill` does. `progress` hears of each step but the last.

        It hears of nothing after the end. The blocks that it hears of are the first of the held KV, unless it also
        hears that they are lost.
        """


class LendsPrefixes(Protocol):
    """An engine that lets other workers read blocks of its prefix cache, and takes theirs into it: see Reservation."""

    async def lend_prefix(self, block_hashes: Sequence[bytes], rank: int) -> HeldBlocks | None:
        """Holds the blocks of a chain, from the first link on, as far as they are in the pool of a data-parallel rank,
        or can be loaded into it from host memory.

        None if it has none of them, or if too many blocks are held for other workers already. Cancelling frees them.
        """


class PrefillEngine(Protocol):
    """Runs prompts and holds their KV."""

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> HeldKv:
        """Computes the KV of `prompt.context`, samples one token, and holds the blocks."""


class DecodeEngine(Protocol):
    """Runs requests to their end, from pulled KV or from the prompt."""

    async def reserve(self, prompt: Prompt, num_tokens: int) -> Reservation:
        """Reserves blocks for a pull of `num_tokens` tokens. Waits without limit for requests that run here.

        Raises NoFreeBlocks if only KV held for other workers is in the way: they may be waiting for this worker.
        """

    def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        """Generates until the end; the last item is the only Finished. Does not yield the ids of `emitted` again.

        Takes ownership of the reservation, also when it raises. Each item has all ids since the previous one.
        """


class ReleasesMemory(Protocol):
    """An engine that gives its memory back for a while, as far as it can: its prefix cache is gone then."""

    async def release_memory(self) -> bool:
        """Frees it; nothing may be asked of the engine then until it has resumed. False, with nothing changed, if it is
        in use.
        """

    async def resume_memory(self) -> None:
        """Takes it again. Raises EngineFailed, and has taken nothing then, or is unhealthy."""


class NotOpened(EngineFailed, AttributeError):
    """An engine was used before its context was entered, which is a mistake of the code that uses it."""


class Engine(PrefillEngine, DecodeEngine, Protocol):
    """One model in one process. An async context manager: entering loads and warms up, leaving frees.

        async with PyTorchEngine(config) as engine: ...

    Raises InvalidRequest for a prompt that can never fit, Overloaded when a bounded queue is full, and EngineFailed
    when computing fails. After a fatal error every call raises EngineFailed, and `healthy` is false.

    An engine needs `facts`, `load` and `decode`. Without more it holds no KV and takes no handoffs. Before it is
    entered, whatever entering creates raises NotOpened. Leaving it twice is harmless.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise NotOpened(f"{type(self).__name__}.{name}: the engine has not been opened")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        return

    @property
    def facts(self) -> ModelFacts: ...

    def load(self) -> EngineLoad:
        """Cheap and safe to call from the event loop at any time."""

    @property
    def healthy(self) -> bool:
        return True

    @property
    def responsive(self) -> bool:
        """False also while the engine takes far longer to answer than usual: it should get no work until it answers."""
        return self.healthy

    @property
    def memory(self) -> BlockMemory | None:
        """The pool that other workers may pull held KV from; None if the engine transfers KV itself, or holds none."""
        return None

    @property
    def kv_transfer(self) -> TransfersKv | None:
        """The engine's own transfer of KV to other engines; None if its blocks are pulled from `memory`."""
        return None

    @property
    def progress(self) -> ReportsProgress | None:
        """Itself, if others can read the first blocks of a prompt from `memory` while it computes the rest."""
        return None

    @property
    def prefixes(self) -> LendsPrefixes | None:
        """Itself, if it lends what its prefix cache has; None if not."""
        return None

    def digest(self, block_ids: Sequence[int]) -> list[int]:
        """The digests of blocks of its memory, whose content is final: see seals.py. Blocking; call it in a thread."""
        assert self.memory is not None
        return host_digests(self.memory, block_ids)

    @property
    def kv_events(self) -> ReportsKvEvents | None:
        """The events of its prefix cache; None if it has none."""
        return None

    @property
    def releases_memory(self) -> ReleasesMemory | None:
        """Itself, if it can give its memory back while it has no requests; None if not."""
        return None

    async def end_session(self, key: bytes) -> int:
        """Lets cached blocks be evicted first that no session has but this one (Session.key). Returns how many.

        0 for an unknown session, and of an engine that does not know sessions.
        """
        del key
        return 0

    @property
    def moves_decodes(self) -> bool:
        """True if a running generation can be lent and yielded, to go on in another engine."""
        return False

    @property
    def journal(self) -> Journal | None:
        """The journal by which its decodes outlive its process; None if they do not."""
        return None

    def end_process(self) -> None:
        """Kills this process as soon as no step runs, for one that goes on with its journal."""
        os.kill(os.getpid(), signal.SIGKILL)

    def pop_recovered(self) -> Sequence[RecoveredDecode]:
        """The decodes that the worker's last process has left, once. The caller owns their reservations."""
        return ()

    @property
    def loras(self) -> ServesLoras | None:
        """The engine's adapters; None if it serves none, and then no prompt has one."""
        return None

    def generation(self, source: Prompt | PulledKv, sampling: Sampling) -> Generation:
        """The generation of `decode`, which can be pulled too. An engine whose `decode` returns one overrides it."""
        return ClosingStream(self.decode(source, sampling))

    async def prefill(self, prompt: Prompt, sampling: Sampling) -> HeldKv:
        """Computes and holds KV. Raises Unsupported unless the engine holds KV. See PrefillEngine."""
        del prompt, sampling
        raise Unsupported(f"the {self.facts.engine} engine holds no KV for other workers")

    async def reserve(self, prompt: Prompt, num_tokens: int) -> Reservation:
        """Reserves blocks for a pull. Raises Unsupported unless the engine has a pool. See DecodeEngine."""
        del prompt, num_tokens
        raise Unsupported(f"the {self.facts.engine} engine has no pool to pull KV into")


Vector: TypeAlias = NDArray[numpy.float32]


class TextEmbedder(EnginePart, Protocol):
    """An embedder, whose facts have `embedding`."""

    async def embed(self, inputs: Sequence[Sequence[int]]) -> Sequence[Vector]:
        """Returns a vector of `dimensions` numbers for each input, in order; not normalized.

        Each input has from 1 to `max_input_tokens` ids of the vocabulary. Cancelling drops the call if it waits.
        """
