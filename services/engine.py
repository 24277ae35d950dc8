"""What an engine is: the Protocols that every engine fulfils, its facts, and its load.

An engine never imports grpc and knows nothing of text. Closing the generator of `decode`, or cancelling the task that
awaits `prefill` or `reserve`, is the abort; it is done when the blocks are back. tests/contract/ is the definition.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.answer import Finished, Tokens
from services.kv import BlockMemory, HeldKv, KvLayout, PulledKv, Reservation
from services.prompt import Embedding, Media, Prompt, Sampling


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
