"""Whether a prompt's media are such that an engine can compute it."""

from collections.abc import Iterator

from rpc.errors import FieldViolation, InvalidRequest, Unsupported
from services.engine import ModelFacts
from services.prompt import Prompt


def check_media(prompt: Prompt, facts: ModelFacts) -> None:
    """Raises InvalidRequest if media are not within the prompt, overlap, or have embeddings of another shape.

    Raises Unsupported where the model takes no media.
    """
    if not prompt.media:
        return
    if facts.images is None:
        raise Unsupported(f"prompt.media: the model {facts.name!r} takes text only")
    violations = list(_violations(prompt, facts.images.hidden_size))
    if violations:
        raise InvalidRequest(violations)


def check_computable(prompt: Prompt) -> None:
    """Raises InvalidRequest naming the embeddings that are missing: the prompt can only be pulled."""
    missing = [index for index, span in enumerate(prompt.media) if span.embedding is None]
    if missing:
        raise InvalidRequest([FieldViolation(f"prompt.media[{index}].embedding", "is missing") for index in missing])


def _violations(prompt: Prompt, hidden_size: int) -> Iterator[FieldViolation]:
    free_from = 0
    for index, span in enumerate(prompt.media):
        if not free_from <= span.start < span.end <= len(prompt.token_ids):
            yield FieldViolation(
                f"prompt.media[{index}].start", "is not within the prompt, or not after the one before"
            )
        if span.embedding is not None and span.embedding.shape != (span.num_tokens, hidden_size):
            text = f"{span.embedding.shape} is not {(span.num_tokens, hidden_size)}"
            yield FieldViolation(f"prompt.media[{index}].embedding.shape", text)
        free_from = span.end
