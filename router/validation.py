"""Validates requests before any worker is called, and resolves their defaults."""

import random
from collections.abc import Sequence

from baton.engine.v1 import prompt_pb2
from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, model_pb2, sampling_pb2
from baton.sampling_options import OPTIONS
from engine_protocol.request_rules import check_bias_ids, check_params
from router.config import LimitsConfig
from router.multimodal.prompt import MultimodalPrompt
from router.sessions import check_cache
from router.text import chat_input, request_input
from router.text import media_validation as media
from router.text.served_model import ServedModel
from rpc.violations import Violations, is_request_id

_LONGEST_NAME = 256
_LONGEST_KEY = 1024
_MOST_TOKENS_A_MESSAGE = 1024
_LONGEST_DELAY_SECONDS = 10.0
# Of options that are remembered: how many, and how long each may be.
_REMEMBERED_OPTIONS = 256
_LONGEST_OPTIONS = 1024
_REMEMBERED_PROMPT = 16 * 1024  # characters; of a longer one the copy costs more than the check
# In one message: the values and ids of a prompt's log probabilities.
_MOST_PROMPT_LOGPROBS = 131_072


class OptionChecks:
    """Checks requests as `check` does, and remembers the options of those that were right: clients send the same again.

    Of a text with options that are known, only the text, the request id and the session key are looked at.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._known: dict[bytes, ServedModel] = {}  # by what is remembered of the request, the model it was right for

    def check(self, request: generate_pb2.GenerateRequest, model: ServedModel) -> None:
        """Raises InvalidRequest naming every wrong field, or Unsupported naming what the model lacks."""
        is_short = request.WhichOneof("input") == "prompt" and len(request.prompt) <= _REMEMBERED_PROMPT
        if not is_short or request.HasField("cache"):
            check(request, model, self._limits)
            return
        options = _options(request)
        if self._known.get(options) is not model or not _has_right_texts(request, model):
            check(request, model, self._limits)
            self._remember(options, model)

    def _remember(self, options: bytes, model: ServedModel) -> None:
        if len(options) > _LONGEST_OPTIONS:
            return
        if len(self._known) >= _REMEMBERED_OPTIONS:
            self._known.clear()
        self._known[options] = model


def _has_right_texts(request: generate_pb2.GenerateRequest, model: ServedModel) -> bool:
    """True unless `check` finds something wrong in what is not among the options."""
    is_named_right = is_request_id(request.request_id) and len(request.routing.session_key) <= _LONGEST_KEY
    return is_named_right and 0 < len(request.prompt) <= model.most_characters


def _options(request: generate_pb2.GenerateRequest) -> bytes:
    """The request without what differs from one to the next."""
    options = generate_pb2.GenerateRequest()
    options.CopyFrom(request)
    options.prompt = options.request_id = ""
    if options.HasField("routing"):
        options.routing.session_key = ""
    return options.SerializeToString(deterministic=True)


def check(request: generate_pb2.GenerateRequest, model: ServedModel, limits: LimitsConfig) -> None:
    """Raises InvalidRequest naming every wrong field, or Unsupported naming what the model lacks."""
    violations = Violations()
    _check_identity(request, violations)
    if request.HasField("cache"):
        check_cache(request, violations)
    _bound(request, model, limits, violations)
    _check_input(request, model, violations)
    media.check_media(request, limits.max_images, violations)
    _check_sampling(request.sampling, model.limits, limits.max_answers, violations)
    _check_texts("sampling.bad_words", request.sampling.bad_words, limits.max_bad_word_length, violations)
    _check_stopping(request.stopping, model, limits, violations)
    _check_response(request.response, model.limits, violations)
    is_found = not (request.chat.tool_choice.is_single and request.response.raw_text)
    violations.require(is_found, "chat.tool_choice.is_single", "cannot be followed with response.raw_text")
    violations.raise_any()
    _check_supported(request, model)


def resolve_sampling(
    request: generate_pb2.GenerateRequest, prompt: MultimodalPrompt, model: ServedModel, answer: int = 0
) -> prompt_pb2.Sampling:
    """The sampling of one answer to a validated request, with a seed, and with max_tokens limited by the context.

    The prompt has its full length; `answer` counts from 0. Raises InvalidRequest if the prompt does not fit.
    """
    prompt_tokens = prompt.num_tokens
    request_input.require_fits_context(request, prompt_tokens, model)
    left = model.limits.max_context_tokens - prompt_tokens
    stopping = request.stopping
    # Set in place: messages as arguments are serialized and parsed again.
    sampling = prompt_pb2.Sampling()
    sampling.params.CopyFrom(request.sampling)
    stop = sampling.stop
    stop.max_tokens = min(stopping.max_tokens, left) if stopping.HasField("max_tokens") else left
    stop.min_tokens = min(stopping.min_tokens, left)
    stop.stop_token_ids.extend(stopping.stop_token_ids)
    stop.ignore_eos = stopping.ignore_eos
    if request.response.HasField("logprobs"):
        sampling.logprobs = request.response.logprobs
    if request.HasField("guided"):
        sampling.guided.CopyFrom(request.guided)
    if request.response.HasField("prompt_logprobs") and answer == 0:
        _bound_prompt_logprobs(request.response.prompt_logprobs, prompt_tokens)
        sampling.prompt_logprobs = request.response.prompt_logprobs
    sampling.params.ClearField("n")  # workers run single answers
    if prompt.bad_sequences:
        sampling.params.ClearField("bad_words")  # workers have no text
        sampling.bad_sequences.extend(generate_pb2.TokenIds(ids=ids) for ids in prompt.bad_sequences)
    if sampling.params.HasField("seed"):
        sampling.params.seed = (sampling.params.seed + answer) % 2**64
    elif "seed" not in model.capabilities.unsupported_sampling:
        sampling.params.seed = random.getrandbits(64)
    return sampling


def _bound_prompt_logprobs(top: int, prompt_tokens: int) -> None:
    numbers = prompt_tokens * (1 + 2 * top)
    if numbers > _MOST_PROMPT_LOGPROBS:
        text = f"makes {numbers} numbers of {prompt_tokens} tokens; the limit is {_MOST_PROMPT_LOGPROBS}"
        raise InvalidRequest.of("response.prompt_logprobs", text)


def _bound(
    request: generate_pb2.GenerateRequest, model: ServedModel, limits: LimitsConfig, violations: Violations
) -> None:
    """Raises InvalidRequest if a repeated field is too long to check each item."""
    request_input.bound_ids("token_ids.ids", request.token_ids.ids, model, violations)
    chat_input.bound(request.chat, limits, violations)
    violations.count("sampling.logit_bias", len(request.sampling.logit_bias), limits.max_logit_biases)
    violations.count("sampling.bad_words", len(request.sampling.bad_words), limits.max_bad_words)
    violations.count("stopping.stop_token_ids", len(request.stopping.stop_token_ids), limits.max_stop_token_ids)
    violations.count("stopping.stop", len(request.stopping.stop), limits.max_stop_strings)
    violations.raise_any()


def _check_identity(request: generate_pb2.GenerateRequest, violations: Violations) -> None:
    violations.request_id(request.request_id)
    _check_name("lora_name", request.lora_name, _LONGEST_NAME, violations)
    _check_name("routing.session_key", request.routing.session_key, _LONGEST_KEY, violations)
    _check_name("routing.cache_salt", request.routing.cache_salt, _LONGEST_KEY, violations)
    known = request.routing.topology in generate_pb2.Topology.values()
    violations.require(known, "routing.topology", f"unknown topology {request.routing.topology}")


def _check_name(field: str, name: str, longest: int, violations: Violations) -> None:
    if len(name) > longest:
        violations.add(field, f"has {len(name)} characters of at most {longest}")


def _check_input(request: generate_pb2.GenerateRequest, model: ServedModel, violations: Violations) -> None:
    match request.WhichOneof("input"):
        case None:
            violations.add("prompt", "is missing; give one of prompt, token_ids, chat")
        case "prompt":
            request_input.check_prompt(request.prompt, model, violations)
        case "chat":
            chat_input.check(request.chat, model, violations)
        case _:
            violations.require(bool(request.token_ids.ids), "token_ids.ids", "is empty")
            violations.token_ids("token_ids.ids", request.token_ids.ids, model.limits.vocab_size)


def _check_sampling(
    sampling: sampling_pb2.SamplingParams, limits: model_pb2.ModelLimits, max_answers: int, violations: Violations
) -> None:
    if not sampling.ByteSize():
        return
    check_params("sampling", sampling, violations)
    check_bias_ids("sampling", sampling, limits.vocab_size, violations)
    if sampling.HasField("n"):
        violations.number("sampling.n", sampling.n, 1, max_answers)


def _check_response(
    response: generate_pb2.ResponseOptions, limits: model_pb2.ModelLimits, violations: Violations
) -> None:
    if response.HasField("logprobs"):
        violations.number("response.logprobs", response.logprobs, 0, limits.max_logprobs)
    if response.HasField("prompt_logprobs"):
        violations.number("response.prompt_logprobs", response.prompt_logprobs, 0, limits.max_logprobs)
    violations.number("response.min_tokens_per_message", response.min_tokens_per_message, 0, _MOST_TOKENS_A_MESSAGE)
    delay = response.max_delay
    seconds = delay.seconds + delay.nanos / 1e9
    is_possible = 0 <= seconds <= _LONGEST_DELAY_SECONDS and abs(delay.nanos) < 1_000_000_000
    if response.HasField("keep"):
        keep = response.keep
        violations.require(
            keep.seconds >= 0 <= keep.nanos < 1_000_000_000, "response.keep", "must be a duration that is not negative"
        )
    violations.require(is_possible, "response.max_delay", f"must be from 0 to {_LONGEST_DELAY_SECONDS:g} s")


def _check_stopping(
    stopping: sampling_pb2.StoppingOptions, model: ServedModel, limits: LimitsConfig, violations: Violations
) -> None:
    if stopping.HasField("max_tokens"):
        violations.number("stopping.max_tokens", stopping.max_tokens, 1)
        fits = stopping.min_tokens <= max(stopping.max_tokens, 1)
        violations.require(fits, "stopping.min_tokens", f"is above max_tokens, {stopping.max_tokens}")
    most = model.limits.max_context_tokens
    violations.require(stopping.min_tokens < most, "stopping.min_tokens", f"the model's context ends at {most}")
    _check_texts("stopping.stop", stopping.stop, limits.max_stop_string_length, violations)
    violations.token_ids("stopping.stop_token_ids", stopping.stop_token_ids, model.limits.vocab_size)


def _check_texts(path: str, texts: Sequence[str], longest: int, violations: Violations) -> None:
    """Notes each text that is empty or too long."""
    for index, text in enumerate(texts):
        violations.require(bool(text), f"{path}[{index}]", "is empty")
        violations.require(len(text) <= longest, f"{path}[{index}]", f"has {len(text)} characters of at most {longest}")


def _check_supported(request: generate_pb2.GenerateRequest, model: ServedModel) -> None:
    capabilities = model.capabilities
    wanted_input = request.WhichOneof("input")
    unsupported = {
        "generation": capabilities.embeddings_only or capabilities.images_only,
        "prompt": wanted_input == "prompt" and model.tokenizer is None,
        "chat": wanted_input == "chat" and not model.can_chat,
        "stop strings": bool(request.stopping.stop) and model.tokenizer is None,
        "sampling.bad_words": bool(request.sampling.bad_words) and model.tokenizer is None,
        "guided decoding": request.HasField("guided") and not capabilities.guided_decoding,
        "tools": bool(request.chat.tools) and not capabilities.tools,
        "logprobs": request.response.HasField("logprobs") and not capabilities.logprobs,
        "prompt logprobs": request.response.HasField("prompt_logprobs") and not capabilities.prompt_logprobs,
        "media": media.count_media(request) > 0 and not capabilities.modalities,
    }
    wanted = [name for name, is_unsupported in unsupported.items() if is_unsupported]
    wanted += [f"sampling.{name}" for name in capabilities.unsupported_sampling if _changes(request.sampling, name)]
    if wanted:
        raise model.unsupported(", ".join(dict.fromkeys(wanted)))
    media.require_modalities(request, model)


def _changes(sampling: sampling_pb2.SamplingParams, name: str) -> bool:
    """True if a field is set, and to something else than its default."""
    values = {field.name: value for field, value in sampling.ListFields()}
    return name in values and (name not in OPTIONS or values[name] != OPTIONS[name].row.neutral)
