"""The media of a prompt as they came off the wire, and whether they can stand where they are said to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rpc.errors import FieldViolation, InvalidRequest, Unsupported
from services.engine import ImageRules, ModelFacts
from services.handoffs import LeasedBlocks
from services.kv import EMBEDDING_BLOCK_ROWS, embedding_bytes
from services.prompt import Prompt


@dataclass(frozen=True, slots=True)
class GivenEmbedding:
    """An embedding, or the lease on one; neither is to be trusted unchecked."""

    digest: bytes
    shape: tuple[int, ...]
    dtype: str
    source: bytes | LeasedBlocks | None


@dataclass(frozen=True, slots=True)
class GivenSpan:
    """Placeholder ids `start:start + num_tokens`; no embedding where the KV comes by a handoff."""

    start: int
    num_tokens: int
    digest: bytes
    embedding: GivenEmbedding | None


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


def _wrong_places(rules: ImageRules, prompt: Prompt, spans: Sequence[GivenSpan]) -> Iterator[FieldViolation]:
    free_from = 0
    for index, span in enumerate(spans):
        path, end = f"prompt.media[{index}]", span.start + span.num_tokens
        if not span.digest:
            yield FieldViolation(f"{path}.digest", "is empty")
        if not span.num_tokens or end > len(prompt.token_ids):
            text = f"{span.num_tokens} from {span.start} on are not within {len(prompt.token_ids)} tokens"
            yield FieldViolation(f"{path}.num_tokens", text)
            continue
        if span.start < free_from:
            yield FieldViolation(f"{path}.start", f"is before the end of the one before it, {free_from}")
        elif set(prompt.token_ids[span.start : end]) != {rules.placeholder_token_id}:
            yield FieldViolation(f"{path}.start", f"other tokens are there than {rules.placeholder_token_id}")
        free_from = max(free_from, end)


def _unfilled(rules: ImageRules, prompt: Prompt, spans: Sequence[GivenSpan]) -> list[FieldViolation]:
    """A placeholder without a medium: its KV would be taken for that of any other image."""
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
            yield FieldViolation(f"{path}.source", "is missing: neither inline nor lease")
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
        yield FieldViolation(f"{path}.block_ids", f"{len(leased.block_ids)} are not {blocks}")
