"""What an engine answers: tokens, and how and why they ended."""

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Why an engine ended a request; stop strings are the router's."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"


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
