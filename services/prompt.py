"""What is asked of an engine: a prompt, its media, and how to sample what follows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
