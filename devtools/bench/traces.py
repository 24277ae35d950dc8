"""Traces of requests that share prefixes, in Mooncake's format: read from a file, or generated.

A line is a JSON object of `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and `hash_ids`: one
number for each 512 tokens of the prompt, equal wherever all tokens up to there are equal.
"""

import errno
import gzip
import hashlib
import io
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path

from baton.errors import ConfigError
from baton.files import read_file

BLOCK_TOKENS = 512
_LARGEST_BYTES = 1024 * 1024 * 1024  # public traces have up to 0.2 GiB

# Generated traces. All begin with one of 24 system prompts, of Zipf's popularity: conversations, agents with long
# contexts, both, single questions, and prompts that are nothing but the system prompt.
KINDS = ("mixed", "conversations", "agents", "system-prompts", "zipf")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request: when it comes, in seconds from the first one, and its prompt as numbered blocks."""

    at_seconds: float
    hash_ids: tuple[int, ...]
    input_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a file, which may be compressed by gzip, in the order of their times.

    Raises ConfigError naming a line that is not in the format.
    """
    try:
        content = read_file(path, _LARGEST_BYTES)
        if path.suffix == ".gz":
            content = _unzipped(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    requests = [_traced(line, f"{path}:{number}") for number, line in lines]
    if not requests:
        raise ConfigError(f"{path}: has no requests")
    first = min(request.at_seconds for request in requests)
    requests = [replace(request, at_seconds=request.at_seconds - first) for request in requests]
    return sorted(requests, key=lambda request: request.at_seconds)


def _unzipped(content: bytes) -> bytes:
    with gzip.open(io.BytesIO(content)) as file:
        plain = file.read(_LARGEST_BYTES + 1)
    if len(plain) > _LARGEST_BYTES:
        raise OSError(errno.EFBIG, f"has more than {_LARGEST_BYTES} bytes")
    return plain


def _traced(line: bytes, place: str) -> TracedRequest:
    try:
        fields = json.loads(line)
        blocks = tuple(int(each) for each in fields["hash_ids"])
        length, output = int(fields["input_length"]), int(fields["output_length"])
        request = TracedRequest(float(fields["timestamp"]) / 1e3, blocks, length, output)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{place}: is not a request in Mooncake's format: {error!r}") from error
    if not (len(blocks) - 1) * BLOCK_TOKENS < length <= len(blocks) * BLOCK_TOKENS:
        raise ConfigError(
            f"{place}: input_length {length} does not fit {len(blocks)} hash_ids of {BLOCK_TOKENS} tokens"
        )
    return request


def generate_trace(seed: int, requests: int, seconds: float, kind: str = "mixed") -> list[TracedRequest]:
    """Requests of one of `KINDS` that begin within so many seconds; conversations may end later."""
    source, numbers = random.Random(seed), count()
    systems = [[next(numbers) for _ in range(source.randrange(2, 13))] for _ in range(24)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    found: list[TracedRequest] = []
    while len(found) < requests:
        begin = source.random() * seconds
        start = list(source.choices(systems, weights)[0])
        match kind:
            case "mixed":
                found += _conversation(source, numbers, begin, start, is_agent=source.random() < 0.2)
            case "conversations" | "agents":
                found += _conversation(source, numbers, begin, start, is_agent=kind == "agents")
            case "system-prompts":
                found.append(_request(source, begin, [*start, next(numbers)]))
            case "zipf":
                found.append(_request(source, begin, start))
            case _:
                raise ValueError(f"unknown kind of trace {kind!r}; expected one of {', '.join(KINDS)}")
    return sorted(found[:requests], key=lambda request: request.at_seconds)


def _request(source: random.Random, at: float, blocks: list[int]) -> TracedRequest:
    length = (len(blocks) - 1) * BLOCK_TOKENS + source.randrange(1, BLOCK_TOKENS + 1)
    return TracedRequest(at, tuple(blocks), length, source.randrange(8, 400))


def _conversation(
    source: random.Random, numbers: Iterator[int], at: float, blocks: list[int], *, is_agent: bool
) -> Iterator[TracedRequest]:
    """Each turn's prompt is the one before it, its answer, and what is new. Agents' turns are longer and quicker."""
    for _ in range(source.randrange(1, 12 if is_agent else 6)):
        blocks = blocks + [next(numbers) for _ in range(source.randrange(1, 24 if is_agent else 10))]
        yield _request(source, at, blocks)
        at += source.expovariate(1 / (3.0 if is_agent else 20.0))


def prompt_ids(request: TracedRequest, block_tokens: int) -> list[int]:
    """Token ids below 256 for a prompt, each of its blocks shortened to `block_tokens`."""
    ids = [token for number in request.hash_ids for token in _block(number, block_tokens)]
    last = request.input_tokens - (len(request.hash_ids) - 1) * BLOCK_TOKENS
    short = block_tokens - max(1, last * block_tokens // BLOCK_TOKENS)
    return ids[: len(ids) - short]


def ideal_hit_rate(requests: Sequence[TracedRequest]) -> float:
    """Of one endless cache: which share of all blocks was there before."""
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        total += len(request.hash_ids)
        hits += next((index for index, each in enumerate(request.hash_ids) if each not in seen), len(request.hash_ids))
        seen.update(request.hash_ids)
    return hits / total


@lru_cache(maxsize=100_000)
def _block(number: int, tokens: int) -> bytes:
    return hashlib.shake_128(str(number).encode()).digest(tokens)
