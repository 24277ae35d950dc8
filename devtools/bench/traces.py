"""Traces of requests that share prefixes, in Mooncake's format: read from a file, or generated.

A line is a JSON object of `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and `hash_ids`: one
number for each 512 tokens of the prompt, equal wherever all tokens up to there are equal. Lines of agents also have a
`session_id`; each but the first of a session may have, instead of its `timestamp`, the `delay` in milliseconds after
the answer of the line before it, and `ends_session` says that no line of the session follows. Other fields are
ignored.
"""

import errno
import gzip
import hashlib
import io
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.errors import ConfigError
from baton.files import read_file

BLOCK_TOKENS = 512
_LARGEST_BYTES = 1024 * 1024 * 1024  # public traces have up to 0.2 GiB

# So long an answer's token is taken to need where a request comes so long after an answer.
TOKEN_SECONDS = 0.02

# Generated traces. All begin with one of 24 system prompts, of Zipf's popularity: conversations, agents with long
# contexts, both, single questions, and prompts that are nothing but the system prompt.
KINDS = ("mixed", "conversations", "agents", "system-prompts", "zipf")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request: when it comes, in seconds from the first one, and its prompt as numbered blocks.

    With `delay_seconds` it comes so long after the answer of its session's request before it, and `at_seconds` is when
    that is if answers take 20 ms a token.
    """

    at_seconds: float
    hash_ids: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    session_id: str = ""
    delay_seconds: float | None = None
    ends_session: bool = False


_Milliseconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Tokens = Annotated[int, Field(ge=0, le=1 << 31)]
_BlockNumber = Annotated[int, Field(ge=0, lt=1 << 64)]


class _Line(BaseModel):
    """A line of a file."""

    model_config = ConfigDict(strict=True, frozen=True)

    timestamp: _Milliseconds | None = None
    delay: _Milliseconds | None = None
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[_BlockNumber, ...]
    session_id: str = ""
    ends_session: bool = False


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
    requests: list[TracedRequest] = []
    latest: dict[str, TracedRequest] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            request = _traced(line, f"{path}:{number}", latest)
            requests.append(request)
            if request.session_id:
                latest[request.session_id] = request
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


def _traced(line: bytes, place: str, latest: Mapping[str, TracedRequest]) -> TracedRequest:
    """The request of a line. `latest` has the one before it of each session."""
    try:
        fields = _Line.model_validate_json(line)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        name = "".join(f"{part}: " for part in fault["loc"][:1])
        raise ConfigError(f"{place}: is not a request in Mooncake's format: {name}{fault['msg']}") from error
    before = latest.get(fields.session_id)
    if problem := _problem(fields, before):
        raise ConfigError(f"{place}: {problem}")
    delay = None if fields.delay is None else fields.delay / 1e3
    at = (fields.timestamp or 0.0) / 1e3
    if delay is not None and before is not None:
        at = before.at_seconds + before.output_tokens * TOKEN_SECONDS + delay
    session, ends = fields.session_id, fields.ends_session
    return TracedRequest(at, fields.hash_ids, fields.input_length, fields.output_length, session, delay, ends)


def _problem(line: _Line, before: TracedRequest | None) -> str:
    """The reason that a line is no request after the one `before` of its session; empty if it is."""
    blocks = len(line.hash_ids)
    if (line.timestamp is None) == (line.delay is None):
        return "expected either a timestamp or a delay"
    if not max(0, (blocks - 1) * BLOCK_TOKENS) < line.input_length <= blocks * BLOCK_TOKENS:
        return f"input_length {line.input_length} does not fit {blocks} hash_ids of {BLOCK_TOKENS} tokens"
    if len(set(line.hash_ids)) < blocks:
        return "has one of its hash_ids twice: they number blocks together with all tokens before them"
    if before is not None:
        return _problem_after(before, line)
    return "" if line.delay is None else "has a delay, but no line of its session_id comes before it"


def _problem_after(before: TracedRequest, line: _Line) -> str:
    if before.ends_session:
        return f"follows the line that ends session {line.session_id!r}"
    # After a delay the time of `before` is only assumed.
    if line.timestamp is not None and before.delay_seconds is None and line.timestamp / 1e3 < before.at_seconds:
        return f"comes before the line before it of session {line.session_id!r}"
    return ""


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
