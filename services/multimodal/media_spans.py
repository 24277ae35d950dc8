"""The media of a prompt: read from its message, and checked against the model's rules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.engine.v1 import encode_pb2, prompt_pb2
from baton.errors import FieldViolation, InvalidRequest, Unsupported
from services.engines.base import ModelFacts
from services.engines.kv import EMBEDDING_BLOCK_ROWS, embedding_bytes, packed_ids
from services.engines.prompt import Prompt
from services.engines.rules import ImageRules
from services.handoff.remote_handoff import LeasedBlocks
from services.telemetry.timings import as_seconds


@dataclass(frozen=True, slots=True)
class GivenEmbedding:
    """An embedding from a request, or a lease on one; `check_spans` checks it."""

    digest: bytes
    shape: tuple[int, ...]
    dtype: str
    source: bytes | LeasedBlocks | None


@dataclass(frozen=True, slots=True)
class GivenSpan:
    """Placeholder ids `start:start + num_tokens` of a prompt. `embedding` may be None if the KV comes by a handoff."""

    start: int
    num_tokens: int
    digest: bytes
    embedding: GivenEmbedding | None


def read_spans(message: prompt_pb2.Prompt) -> list[GivenSpan]:
    """Returns the prompt's media, unchecked; see `check_spans`."""
    return [
        GivenSpan(
            start=span.start,
            num_tokens=span.num_tokens,
            digest=span.digest,
            embedding=_given(span.embedding) if span.HasField("embedding") else None,
        )
        for span in message.media
    ]


def check_spans(facts: ModelFacts, prompt: Prompt, spans: Sequence[GivenSpan]) -> None:
    """Raises InvalidRequest naming every wrong field, and Unsupported if the model takes no media at all."""
    if facts.images is None:
        if spans:
            raise Unsupported(f"prompt.media: the model {facts.name!r} takes text only")
        return
    violations = [*_wrong_places(facts.images, prompt, spans), *_wrong_embeddings(facts.images, spans)]
    if not violations:
        violations = _unfilled(facts.images, prompt, spans)
    if violations:
        raise InvalidRequest(violations)


def _given(message: encode_pb2.Embedding) -> GivenEmbedding:
    return GivenEmbedding(message.digest, tuple(message.shape), message.dtype, _source(message))


def _source(message: encode_pb2.Embedding) -> bytes | LeasedBlocks | None:
    match message.WhichOneof("source"):
        case "inline":
            return message.inline
        case "lease":
            return _leased(message.lease)
        case _:
            return None


def _leased(message: encode_pb2.EmbeddingLease) -> LeasedBlocks:
    return LeasedBlocks(
        handoff_id=message.handoff_id,
        worker_id=message.worker_id,
        epoch=message.epoch,
        address=message.address,
        lease_seconds=as_seconds(message.lease),
        layout_digest=message.layout_digest,
        num_bytes=message.num_bytes,
        block_ids=packed_ids(tuple(message.block_ids)),
    )


def _wrong_places(rules: ImageRules, prompt: Prompt, spans: Sequence[GivenSpan]) -> Iterator[FieldViolation]:
    free_from = 0
    for index, span in enumerate(spans):
        path, end = f"prompt.media[{index}]", span.start + span.num_tokens
        if not span.digest:
            yield FieldViolation(f"{path}.digest", "is empty")
        if not span.num_tokens or end > len(prompt.token_ids):
            text = f"{span.num_tokens} tokens from {span.start} on exceed the prompt of {len(prompt.token_ids)} tokens"
            yield FieldViolation(f"{path}.num_tokens", text)
            continue
        if span.start < free_from:
            yield FieldViolation(f"{path}.start", f"is before the end of the one before it, {free_from}")
        elif set(prompt.token_ids[span.start : end]) != {rules.placeholder_token_id}:
            yield FieldViolation(f"{path}.start", f"other tokens are there than {rules.placeholder_token_id}")
        free_from = max(free_from, end)


def _unfilled(rules: ImageRules, prompt: Prompt, spans: Sequence[GivenSpan]) -> list[FieldViolation]:
    """Finds placeholders without a medium: their KV would be cached as that of any image."""
    if prompt.token_ids.count(rules.placeholder_token_id) == sum(span.num_tokens for span in spans):
        return []
    return [FieldViolation("prompt.token_ids", f"has placeholders {rules.placeholder_token_id} that no medium is for")]


def _wrong_embeddings(rules: ImageRules, spans: Sequence[GivenSpan]) -> Iterator[FieldViolation]:
    for index, span in enumerate(spans):
        if span.embedding is not None:
            yield from _wrong_embedding(f"prompt.media[{index}].embedding", rules, span, span.embedding)


def _wrong_embedding(
    path: str, rules: ImageRules, span: GivenSpan, embedding: GivenEmbedding
) -> Iterator[FieldViolation]:
    expected = (span.num_tokens, rules.hidden_size)
    num_bytes = embedding_bytes(expected, embedding.dtype)
    if embedding.digest != span.digest:
        yield FieldViolation(f"{path}.digest", "is not the span's")
    if embedding.shape != expected:
        yield FieldViolation(f"{path}.shape", f"{list(embedding.shape)} is not {list(expected)}")
    if num_bytes is None:
        yield FieldViolation(f"{path}.dtype", f"{embedding.dtype!r} is not one of float32, bfloat16, float16")
        return
    match embedding.source:
        case None:
            yield FieldViolation(f"{path}.source", "is missing; give one of inline, lease")
        case bytes() as data:
            if len(data) != num_bytes:
                yield FieldViolation(f"{path}.inline", f"has {len(data)} bytes; {num_bytes} were expected")
        case LeasedBlocks() as leased:
            yield from _wrong_lease(f"{path}.lease", leased, span.num_tokens, num_bytes)


def _wrong_lease(path: str, leased: LeasedBlocks, num_tokens: int, num_bytes: int) -> Iterator[FieldViolation]:
    for name in ("handoff_id", "address"):
        if not getattr(leased, name):
            yield FieldViolation(f"{path}.{name}", "is empty")
    if leased.num_bytes != num_bytes:
        yield FieldViolation(f"{path}.num_bytes", f"{leased.num_bytes} is not {num_bytes}")
    blocks = -(-num_tokens // EMBEDDING_BLOCK_ROWS)
    if len(leased.block_ids) != blocks:
        yield FieldViolation(f"{path}.block_ids", f"has {len(leased.block_ids)} blocks; expected {blocks}")
