"""The requests of a benchmark: when each is sent, its prompt as token ids, and the length of its answer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.files import read_file
from devtools.bench.traces import BLOCK_TOKENS, TracedRequest, prompt_ids

# Ids from 0 on that a model of any vocabulary has, without special tokens in those that are common.
_IDS = (32, 127)


_LARGEST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Planned:
    """A request: when it is sent, in seconds from the start, and what it asks for."""

    at_seconds: float
    token_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, drawn at random from pairs of a prompt's and an answer's."""

    pairs: tuple[tuple[int, int], ...] = ()
    prompt: tuple[int, int] = (512, 512)  # the least and the most; used if there are no pairs
    answer: tuple[int, int] = (128, 128)

    def draw(self, source: random.Random) -> tuple[int, int]:
        """The length of a prompt and of its answer."""
        if self.pairs:
            return source.choice(self.pairs)
        return source.randint(*self.prompt), source.randint(*self.answer)


def read_lengths(path: Path) -> tuple[tuple[int, int], ...]:
    """Pairs from a file with two whole numbers a line. Raises ConfigError naming a wrong line."""
    pairs = []
    try:
        text = read_file(path, _LARGEST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
            raise ConfigError(f"{path}:{number}: expected the lengths of a prompt and of its answer")
        pairs.append((int(words[0]), int(words[1])))
    if not pairs:
        raise ConfigError(f"{path}: has no lengths")
    return tuple(pairs)


def at_rate(rate: float, requests: int, lengths: Lengths, seed: int) -> list[Planned]:
    """Requests that arrive at random (Poisson), `rate` a second on average."""
    source = random.Random(seed)
    planned, at = [], 0.0
    for _ in range(requests):
        planned.append(_planned(source, at, lengths))
        at += source.expovariate(rate)
    return planned


def all_at_once(requests: int, lengths: Lengths, seed: int) -> list[Planned]:
    """Requests without times, to be sent as others end."""
    source = random.Random(seed)
    return [_planned(source, 0.0, lengths) for _ in range(requests)]


def of_trace(trace: Sequence[TracedRequest], speedup: float, block_tokens: int, most_output: int) -> list[Planned]:
    """The requests of a trace, so many times as fast, with `block_tokens` for each block of its prompts."""
    return [
        Planned(
            request.at_seconds / speedup,
            tuple(_IDS[0] + each % (_IDS[1] - _IDS[0]) for each in prompt_ids(request, block_tokens)),
            min(most_output, max(1, request.output_tokens * block_tokens // BLOCK_TOKENS)),
        )
        for request in trace
    ]


def _planned(source: random.Random, at: float, lengths: Lengths) -> Planned:
    prompt, answer = lengths.draw(source)
    return Planned(at, tuple(source.randrange(*_IDS) for _ in range(prompt)), answer)
