"""Decides, before any worker is called, whether a request can be served, and fills in what it left open."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.v1 import prompt_pb2
from baton.inference.v1 import generate_pb2, model_pb2, sampling_pb2
from google.protobuf import json_format

from router import media_admission
from router.config import LimitsConfig
from router.model import ServedModel
from router.template import ImagePart, Turn
from router.tokenizer import Tokenizer
from router.violations import Violations
from rpc.errors import InvalidRequest, Unsupported

_LONGEST_REQUEST_ID = 128
_RESERVED_VARIABLES = ("messages", "tools", "documents")


@dataclass(frozen=True, slots=True)
class Job:
    """A request that may run: its ids, and sampling with nothing left open but the model's own defaults."""

    token_ids: tuple[int, ...]
    sampling: prompt_pb2.Sampling

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most."""
        return self.sampling.stop.max_tokens


def check(request: generate_pb2.GenerateRequest, model: ServedModel, limits: LimitsConfig) -> None:
    """Raises InvalidRequest naming every wrong field, or Unsupported for what this model cannot do."""
    violations = Violations()
    _check_identity(request, violations)
    _check_input(request, model, violations)
    media_admission.check_media(request, limits.max_images, violations)
    _check_sampling(request.sampling, model.limits, violations)
    _check_stopping(request.stopping, model, limits, violations)
    if request.response.HasField("logprobs"):
        most = model.limits.max_logprobs
        violations.number("response.logprobs", request.response.logprobs, 0, most)
    violations.raise_any()
    _check_supported(request, model)


def tokenize(request: generate_pb2.GenerateRequest, model: ServedModel) -> tuple[int, ...]:
    """The ids of a checked request's input, with one placeholder for each medium. Slow for long texts.

    Raises InvalidRequest if they cannot fit, also with all that is known of what the media will take.
    """
    match request.WhichOneof("input"):
        case "token_ids":
            ids = tuple(request.token_ids.ids)
        case "chat":
            ids = tuple(encode_chat(request.chat, model)[0])
        case _:
            ids = tuple(text_tokenizer(model).encode(request.prompt))
    if not ids:
        raise InvalidRequest.of(_input_field(request), "has no tokens")
    media_admission.require_places(request, ids, model)
    require_room(request, expected_tokens(request, ids, model), model)
    return ids


def expected_tokens(request: generate_pb2.GenerateRequest, token_ids: Sequence[int], model: ServedModel) -> int:
    """How long the prompt will be with all its media, as far as that can be known before they are encoded."""
    known = model.images.tokens_per_image if model.images else 0
    return len(token_ids) + media_admission.count_media(request) * max(0, known - 1)


def require_room(request: generate_pb2.GenerateRequest, prompt_tokens: int, model: ServedModel) -> None:
    """Raises InvalidRequest if a prompt of that length leaves no room for an answer."""
    most = model.limits.max_context_tokens
    if prompt_tokens >= most:
        text = f"has {prompt_tokens} tokens, which leaves no room in the context of {most}"
        raise InvalidRequest.of(_input_field(request), text)


def encode_chat(chat: generate_pb2.ChatInput, model: ServedModel) -> tuple[list[int], str]:
    """The ids of a conversation, and the text that the template made of it."""
    tokenizer = text_tokenizer(model)
    text = tokenizer.render([_turn(message) for message in chat.messages], _template_variables(chat))
    violations = Violations()
    _check_length("chat.messages", len(text), model, violations)
    violations.raise_any()
    return tokenizer.encode_chat(text), text


def resolve(request: generate_pb2.GenerateRequest, token_ids: tuple[int, ...], model: ServedModel) -> Job:
    """The job of a checked request: a seed, and max_tokens as far as the context allows.

    The ids have all of each medium's placeholders. Raises InvalidRequest if they do not fit.
    """
    require_room(request, len(token_ids), model)
    room = model.limits.max_context_tokens - len(token_ids)
    stopping = request.stopping
    sampling = prompt_pb2.Sampling(
        params=request.sampling,
        stop=prompt_pb2.StopConditions(
            max_tokens=min(stopping.max_tokens, room) if stopping.HasField("max_tokens") else room,
            min_tokens=min(stopping.min_tokens, room),
            stop_token_ids=stopping.stop_token_ids,
            ignore_eos=stopping.ignore_eos,
        ),
    )
    if request.response.HasField("logprobs"):
        sampling.logprobs = request.response.logprobs
    if not sampling.params.HasField("seed"):
        sampling.params.seed = random.getrandbits(64)
    return Job(token_ids, sampling)


def check_chat(chat: generate_pb2.ChatInput, model: ServedModel, violations: Violations) -> None:
    """Notes every wrong field of a conversation."""
    violations.require(bool(chat.messages), "chat.messages", "is empty")
    length = 0
    for index, message in enumerate(chat.messages):
        path = f"chat.messages[{index}]"
        violations.require(bool(message.role), f"{path}.role", "is empty")
        violations.require(bool(message.parts), f"{path}.parts", "is empty")
        for number, part in enumerate(message.parts):
            violations.require(part.WhichOneof("part") is not None, f"{path}.parts[{number}]", "is empty")
            length += len(part.text)
    _check_length("chat.messages", length, model, violations)
    for name in _RESERVED_VARIABLES:
        reserved = name in chat.template_variables.fields
        violations.require(not reserved, f"chat.template_variables.{name}", "is reserved for the template")


def check_prompt(prompt: str, model: ServedModel, violations: Violations) -> None:
    """Notes a text that is empty, or too long to be worth tokenizing."""
    violations.require(bool(prompt), "prompt", "is empty")
    _check_length("prompt", len(prompt), model, violations)


def require_chat(chat: generate_pb2.ChatInput, model: ServedModel) -> None:
    """Raises Unsupported if the model takes no conversations, or not with such parts."""
    if not model.can_chat:
        raise _unsupported("chat", model)
    if media_admission.has_media(chat.messages) and not model.capabilities.modalities:
        raise _unsupported("media", model)


def text_tokenizer(model: ServedModel) -> Tokenizer:
    """The model's tokenizer. Raises Unsupported if it takes no text."""
    if model.tokenizer is None:
        raise _unsupported("text", model)
    return model.tokenizer


def _check_identity(request: generate_pb2.GenerateRequest, violations: Violations) -> None:
    request_id = request.request_id
    violations.require(
        len(request_id) <= _LONGEST_REQUEST_ID and request_id.isprintable(),
        "request_id",
        f"must be at most {_LONGEST_REQUEST_ID} printable characters",
    )
    known = request.routing.topology in generate_pb2.Topology.values()
    violations.require(known, "routing.topology", f"{request.routing.topology} is no topology")


def _check_input(request: generate_pb2.GenerateRequest, model: ServedModel, violations: Violations) -> None:
    match request.WhichOneof("input"):
        case None:
            violations.add("prompt", "is missing; give one of prompt, token_ids, chat")
        case "prompt":
            check_prompt(request.prompt, model, violations)
        case "chat":
            check_chat(request.chat, model, violations)
        case _:
            violations.require(bool(request.token_ids.ids), "token_ids.ids", "is empty")
            violations.token_ids("token_ids.ids", request.token_ids.ids, model.limits.vocab_size)


def _check_length(field: str, length: int, model: ServedModel, violations: Violations) -> None:
    if model.tokenizer is None:
        return
    most = model.limits.max_context_tokens * model.tokenizer.longest_token
    violations.require(
        length <= most, field, f"has {length} characters; the context of the model never holds more than {most}"
    )


def _check_sampling(
    sampling: sampling_pb2.SamplingParams, limits: model_pb2.ModelLimits, violations: Violations
) -> None:
    if sampling.HasField("temperature"):
        violations.number("sampling.temperature", sampling.temperature, 0)
    if sampling.HasField("top_p"):
        violations.number("sampling.top_p", sampling.top_p, 0, 1)
        violations.require(sampling.top_p != 0, "sampling.top_p", "must be above 0")
    if sampling.HasField("min_p"):
        violations.number("sampling.min_p", sampling.min_p, 0, 1)
    if sampling.HasField("repetition_penalty"):
        violations.number("sampling.repetition_penalty", sampling.repetition_penalty, 0)
        violations.require(sampling.repetition_penalty != 0, "sampling.repetition_penalty", "must be above 0")
    violations.number("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    violations.number("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)
    violations.require(not (sampling.HasField("n") and sampling.n == 0), "sampling.n", "must be at least 1")
    for token_id, bias in sampling.logit_bias.items():
        path = f"sampling.logit_bias[{token_id}]"
        violations.require(token_id < limits.vocab_size, path, f"the vocabulary ends at {limits.vocab_size - 1}")
        violations.number(path, bias, -100, 100)


def _check_stopping(
    stopping: sampling_pb2.StoppingOptions, model: ServedModel, limits: LimitsConfig, violations: Violations
) -> None:
    if stopping.HasField("max_tokens"):
        violations.number("stopping.max_tokens", stopping.max_tokens, 1)
        fits = stopping.min_tokens <= max(stopping.max_tokens, 1)
        violations.require(fits, "stopping.min_tokens", f"is above max_tokens, {stopping.max_tokens}")
    most = model.limits.max_context_tokens
    violations.require(stopping.min_tokens < most, "stopping.min_tokens", f"the model's context ends at {most}")
    count = len(stopping.stop)
    violations.require(count <= limits.max_stop_strings, "stopping.stop", f"has {count} of {limits.max_stop_strings}")
    for index, string in enumerate(stopping.stop[: limits.max_stop_strings]):
        path, longest = f"stopping.stop[{index}]", limits.max_stop_string_length
        violations.require(bool(string), path, "is empty")
        violations.require(len(string) <= longest, path, f"has {len(string)} characters of at most {longest}")
    violations.token_ids("stopping.stop_token_ids", stopping.stop_token_ids, model.limits.vocab_size)


def _check_supported(request: generate_pb2.GenerateRequest, model: ServedModel) -> None:
    capabilities = model.capabilities
    wanted_input = request.WhichOneof("input")
    unsupported = {
        "prompt": wanted_input == "prompt" and model.tokenizer is None,
        "chat": wanted_input == "chat" and not model.can_chat,
        "stop strings": bool(request.stopping.stop) and model.tokenizer is None,
        "guided decoding": request.HasField("guided") and not capabilities.guided_decoding,
        "lora": bool(request.lora_name) and not capabilities.lora,
        "n > 1": request.sampling.n > 1 and not capabilities.multiple_answers,
        "logprobs": request.response.HasField("logprobs") and not capabilities.logprobs,
        "media": media_admission.count_media(request) > 0 and not capabilities.modalities,
    }
    wanted = [name for name, is_unsupported in unsupported.items() if is_unsupported]
    if wanted:
        raise _unsupported(", ".join(wanted), model)
    media_admission.require_modalities(request, model)


def _unsupported(what: str, model: ServedModel) -> Unsupported:
    return Unsupported(f"{model.name} does not support {what}; it supports {model.abilities}")


def _input_field(request: generate_pb2.GenerateRequest) -> str:
    return {"token_ids": "token_ids.ids", "chat": "chat.messages"}.get(request.WhichOneof("input") or "", "prompt")


def _turn(message: generate_pb2.ChatMessage) -> Turn:
    if not media_admission.has_media([message]):
        return Turn(message.role, "".join(part.text for part in message.parts))
    return Turn(message.role, [ImagePart() if part.HasField("media") else part.text for part in message.parts])


def _template_variables(chat: generate_pb2.ChatInput) -> dict[str, object]:
    variables: dict[str, object] = json_format.MessageToDict(chat.template_variables)
    return variables
