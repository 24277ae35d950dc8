"""The input of an engine: a prompt, its media, and the sampling parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from grammars.guide import Guide


@dataclass(frozen=True, slots=True)
class Media:
    """A medium that has been checked: complete, within the limits, and of its MIME type. `content` is the file."""

    content: bytes
    mime_type: str


@dataclass(frozen=True, slots=True)
class Embedding:
    """The rows that replace a medium in the language model's input: `data` is `[tokens, hidden size]`, little endian.

    The digest covers the content, the encoder's weights and the processor: equal digests mean equal embeddings.
    """

    digest: bytes
    shape: tuple[int, int]
    dtype: str  # numpy's or torch's name, such as float32, bfloat16
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Placeholder ids `start:start + num_tokens` of a prompt, which an embedding replaces.

    Without the embedding the prompt's KV can be pulled, but not computed.
    """

    start: int
    num_tokens: int
    digest: bytes
    embedding: Embedding | None = None

    @property
    def end(self) -> int:
        """The index after the last placeholder."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter by its name and the digest of its content: equal ones compute the same."""

    name: str
    digest: str

    @property
    def seed(self) -> str:
        """The text in the root of a hash chain, so that KV of different adapters never has the same name."""
        return f"{self.digest}:{self.name}"


@dataclass(frozen=True, slots=True)
class Retain:
    """The first `tokens` of a prompt, 0 for all, are to stay in the prefix cache for so long, at a tenant's charge."""

    seconds: float
    tokens: int = 0
    priority: int = 0
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class Session:
    """The session that a prompt belongs to, by a key that is its own among all tenants. It may be a part of another."""

    key: bytes
    parent: bytes = b""
    ends: bool = False  # with this request
    next_in_seconds: float = 0.0  # when the next request is expected; 0 is unknown


@dataclass(frozen=True, slots=True)
class Retained:
    """The first tokens of a prompt that are retained, and until when, as a time since 1970."""

    tokens: int
    until: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids to continue. `emitted` are ids that the client already has: part of the context, and counted as
    generated.

    The worker has checked `media` before an engine gets them: the model takes images, the spans are in order, within
    the prompt and do not overlap, each embedding has the model's shape, and none is missing unless KV is pulled.
    """

    token_ids: tuple[int, ...]
    emitted: tuple[int, ...] = ()
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    data_parallel_rank: int | None = None  # the rank to run on; None leaves the choice to the engine
    lora: Lora | None = None  # the adapter to compute with, which the caller keeps in use
    retain: Retain | None = None  # a hint, as the next one: an engine without retention ignores both
    session: Session | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """All ids that precede the next token."""
        return self.token_ids + self.emitted

    @property
    def num_tokens(self) -> int:
        """The length of `context`."""
        return len(self.token_ids) + len(self.emitted)

    @property
    def chain_seed(self) -> str:
        """The text in the root of its hash chain beside the salt; empty without an adapter."""
        return self.lora.seed if self.lora else ""

    @property
    def is_computable(self) -> bool:
        """True if no embedding is missing."""
        return all(span.embedding is not None for span in self.media)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rules of choosing tokens and of stopping. All values are final; only seed and logprobs may be unset.

    Random numbers depend on (seed, position) only, so they are the same after a handoff and in any batch. Positions
    count from the start of the prompt. The router chooses a random seed for a request without one.
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
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # ids that must not be generated one after the other
    logprobs: int | None = None
    guide: Guide | None = None  # the grammar of the whole answer, of which `emitted` is the beginning
    prompt_logprobs: int | None = None  # alternatives of each token of the prompt
