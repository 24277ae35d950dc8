"""The output of an engine: tokens, and the end of a generation."""

import enum
from dataclasses import dataclass

from services.engines.prompt import Retained


class FinishReason(enum.Enum):
    """An engine's reason to end a request; stop strings are the router's. One that has yielded goes on elsewhere."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    YIELDED = "yielded"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities of a token and of the likeliest ones, before temperature, penalties and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural-log probabilities of a prompt's tokens from the second on, before temperature and the rest.

    Each has `top` likeliest alternatives, in `top_ids` and `top_logprobs` one after the other.
    """

    logprobs: tuple[float, ...]
    top: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """New ids, in order: all since the previous item. `logprobs` is empty or as long as `ids`.

    The first item has `prompt_logprobs`, if they were requested.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class FromTiers:
    """Of a prompt's cached tokens, those that were loaded from tiers below the pool, or borrowed for it from a peer.

    `peer_seconds` is how long that took, or the attempt; 0 if none was made. `peer_has_none` if it had nothing of them.
    """

    host: int = 0
    disk: int = 0
    peer: int = 0
    peer_seconds: float = 0.0
    peer_has_none: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation, and the seconds of its stages; `prefill_seconds` is 0 if the KV was pulled.

    `drafted_tokens` were guessed by speculation, and `accepted_tokens` of them are part of the answer. The worker sets
    `num_tokens`, the ids of the answer so far with those that were emitted before; 0 if they were not counted.
    """

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    retained: Retained | None = None
    from_tiers: FromTiers = FromTiers()
    num_tokens: int = 0
