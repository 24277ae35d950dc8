"""The input of a request: checks of texts, and from texts and ids to token ids. Generate and Tokenize share it."""

from collections.abc import Sequence
from itertools import chain

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2
from router.text import chat_input
from router.text import media_validation as media
from router.text.chat_template import LONGEST_SECONDS
from router.text.served_model import ServedModel
from rpc.violations import Violations
from runtime.threads import in_pieces


def tokenize(
    request: generate_pb2.GenerateRequest, model: ServedModel, template_seconds: float = LONGEST_SECONDS
) -> tuple[int, ...]:
    """The ids of a validated request's input, with one placeholder for each media item. Slow for long texts.

    Raises InvalidRequest if they cannot fit, including the tokens that the media are known to take, and SlowTemplate if
    the chat template takes longer than `template_seconds`, which are fewer than its LONGEST_SECONDS.
    """
    match request.WhichOneof("input"):
        case "token_ids":
            ids = tuple(chain.from_iterable(in_pieces(request.token_ids.ids)))
        case "chat":
            ids = tuple(chat_input.encode(request.chat, model, template_seconds, request.routing.cache_salt)[0])
        case _:
            ids = tuple(model.text_tokenizer.encode(request.prompt, request.routing.cache_salt))
    if not ids:
        raise InvalidRequest.of(_input_field(request), "has no tokens")
    media.require_places(request, ids, model)
    require_fits_context(request, expected_tokens(request, ids, model), model)
    return ids


def bad_sequences(request: generate_pb2.GenerateRequest, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The ids of a validated request's bad words, each sequence once. Raises InvalidRequest for a word without any."""
    words = request.sampling.bad_words
    if not words:
        return ()
    encoded = model.text_tokenizer.encode_words(words)
    for index, ways in enumerate(encoded):
        if () in ways:
            raise InvalidRequest.of(f"sampling.bad_words[{index}]", "has no tokens")
    return tuple(dict.fromkeys(ids for ways in encoded for ids in ways))


def expected_tokens(request: generate_pb2.GenerateRequest, token_ids: Sequence[int], model: ServedModel) -> int:
    """The expected length of the prompt with its media, before they are encoded."""
    if model.images is None:
        return len(token_ids)
    return len(token_ids) + media.count_media(request) * max(0, model.images.tokens_per_image - 1)


def require_fits_context(request: generate_pb2.GenerateRequest, prompt_tokens: int, model: ServedModel) -> None:
    """Raises InvalidRequest if a prompt of this length leaves no room for an answer."""
    most = model.limits.max_context_tokens
    if prompt_tokens >= most:
        text = f"has {prompt_tokens} tokens, which leaves no room in the context of {most}"
        raise InvalidRequest.of(_input_field(request), text)


def bound_ids(field: str, ids: Sequence[int], model: ServedModel, violations: Violations) -> None:
    """Notes more token ids than the model's context holds."""
    violations.count(field, len(ids), model.limits.max_context_tokens)


def check_prompt(prompt: str, model: ServedModel, violations: Violations) -> None:
    """Notes a text that is empty, or too long to fit."""
    violations.require(bool(prompt), "prompt", "is empty")
    model.check_length("prompt", len(prompt), violations)


def _input_field(request: generate_pb2.GenerateRequest) -> str:
    return {"token_ids": "token_ids.ids", "chat": "chat.messages"}.get(request.WhichOneof("input") or "", "prompt")
