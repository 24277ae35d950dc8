"""The arguments of an answer: what they mean, and the request that they make."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.images import Image, user_message
from baton.inference.v1 import generate_pb2, sampling_pb2
from baton.requests import UnaryCall, set_field, whole
from baton.sampling_options import OPTIONS, SamplingNumbers

if TYPE_CHECKING:
    from typing_extensions import Unpack

# A prompt, or a whole request.
Prompt = generate_pb2.GenerateRequest | str


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A request, its priority, and how long its answer may take. With a `handle`, its answer is resumed."""

    request: generate_pb2.GenerateRequest
    priority: int
    timeout_seconds: float | None
    handle: str = ""
    is_recorded: bool = False


def generate(
    request: Prompt,
    *,
    images: Sequence[Image] = (),
    model: str = "",
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    min_tokens_per_message: int | None = None,
    json_schema: Mapping[str, Any] | str | None = None,
    regex: str | None = None,
    choice: Sequence[str] = (),
    grammar: str | None = None,
    priority: int = 0,
    record: bool = False,
    timeout_seconds: float | None = None,
    **sampling: "Unpack[SamplingNumbers]",
) -> GenerateCall:
    """Streams an answer: iterate over the events Started, TokenDelta and Finished, or call `.text()`.

    Args:
        request: A prompt, or a GenerateRequest that has all options itself.
        images: File contents (bytes), paths, or URIs; the prompt is then a user's message about them.
        model: Needed where several models are served.
        max_tokens: Tokens to generate at most; by default as many as the context has room for.
        stop: The answer ends before the first of these strings.
        min_tokens_per_message: Later tokens come so many at once, or fewer every 200 ms; by default one by one.
        json_schema: The answer is JSON that is valid under this schema.
        regex: The answer matches this regular expression.
        choice: The answer is one of these texts.
        grammar: The answer follows this grammar, in Lark's notation or GBNF.
        priority: From -10 to 10; where requests wait, higher ones go first.
        record: Asks for a record, which `records` returns, where the router's configuration allows that.
        timeout_seconds: For the whole answer; by default the router's own limit holds.
        {options}

    Raises:
        ValueError: Options are given beside a GenerateRequest, which has fields for them, or several grammars.
        InvalidRequest: A number that its field cannot hold, or an image that cannot be read.

    The request is sent when the first event is read. Leaving the loop, or closing the answer, stops the request on the
    workers.
    """
    message = generate_request(
        request,
        images=images,
        model=model,
        max_tokens=max_tokens,
        stop=stop,
        min_tokens_per_message=min_tokens_per_message,
        guided=guided_by(json_schema=json_schema, regex=regex, choice=choice, grammar=grammar),
        **sampling,
    )
    return GenerateCall(message, priority, timeout_seconds, is_recorded=record)


def _show_options(definition: Callable[..., Any]) -> None:
    """Shows the options of sampling in the signature and the docstring, as if they were written there."""
    shown, keyword = inspect.signature(definition), inspect.Parameter.KEYWORD_ONLY
    written = [one for one in shown.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(one.name, keyword, default=None, annotation=one.kind | None) for one in OPTIONS.values()
    ]
    vars(definition)["__signature__"] = shown.replace(parameters=[*written, *options])
    lines = "\n        ".join(f"{one.name}: {one.row.help[0].upper()}{one.row.help[1:]}." for one in OPTIONS.values())
    definition.__doc__ = (definition.__doc__ or "").replace("{options}", lines)


_show_options(generate)


def resume(handle: str, *, timeout_seconds: float | None = None) -> GenerateCall:
    """Streams an answer that is kept on a worker, from its beginning: of `handle` of another answer, of any process.

    Its first reader, if there still is one, gets StreamAdopted. Raises StreamLost if nothing is left of it.
    """
    return GenerateCall(generate_pb2.GenerateRequest(), 0, timeout_seconds, handle)


def generate_unary(call: GenerateCall) -> UnaryCall[generate_pb2.GenerateUnaryResponse]:
    """The same request, answered by one response."""
    message = generate_pb2.GenerateUnaryRequest(request=call.request)
    seconds, priority, is_recorded = call.timeout_seconds, call.priority, call.is_recorded
    return UnaryCall("InferenceService/GenerateUnary", message, whole, seconds, priority, is_recorded)


def generate_request(
    request: Prompt,
    *,
    images: Sequence[Image] = (),
    model: str = "",
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    min_tokens_per_message: int | None = None,
    guided: generate_pb2.GuidedDecoding | None = None,
    **sampling: "Unpack[SamplingNumbers]",
) -> generate_pb2.GenerateRequest:
    """The request of a prompt and options. Options that are not given stay unset, and the model's defaults apply.

    Raises ValueError for options beside a GenerateRequest, which has fields for them; InvalidRequest for numbers that
    their fields cannot hold, and for images that cannot be read.
    """
    if isinstance(request, generate_pb2.GenerateRequest):
        numbers = (max_tokens, min_tokens_per_message, *sampling.values())
        if images or model or stop or guided or any(number is not None for number in numbers):
            raise ValueError("options go with a prompt that is a string; set them in the GenerateRequest instead")
        return request
    built = generate_pb2.GenerateRequest(model=model)
    if images:
        built.chat.messages.append(user_message(request, images))
    else:
        built.prompt = request
    set_field(built.stopping, "max_tokens", max_tokens, "stopping")
    set_sampling(built.sampling, sampling)
    set_field(built.response, "min_tokens_per_message", min_tokens_per_message, "response")
    if guided is not None:
        built.guided.CopyFrom(guided)
    built.stopping.stop.extend([stop] if isinstance(stop, str) else stop)
    return built


def set_sampling(params: sampling_pb2.SamplingParams, values: Mapping[str, Any]) -> None:
    """Sets options by name; None leaves one unset. Raises TypeError for an unknown one, InvalidRequest for a value that
    its field cannot hold.
    """
    for name, value in values.items():
        if name not in OPTIONS:
            raise TypeError(f"unknown option {name!r}; sampling has {', '.join(OPTIONS)}")
        set_field(params, name, value, "sampling")


def guided_by(
    *,
    json_schema: Mapping[str, Any] | str | None = None,
    regex: str | None = None,
    choice: Sequence[str] = (),
    grammar: str | None = None,
) -> generate_pb2.GuidedDecoding | None:
    """The grammar of an answer; None without one. Raises ValueError for several."""
    given = [json_schema is not None, regex is not None, bool(choice), grammar is not None]
    if not any(given):
        return None
    if sum(given) > 1:
        raise ValueError("an answer follows one grammar: give one of json_schema, regex, choice, grammar")
    if json_schema is not None:
        text = json_schema if isinstance(json_schema, str) else json.dumps(json_schema, ensure_ascii=False)
        return generate_pb2.GuidedDecoding(json_schema=text)
    if choice:
        return generate_pb2.GuidedDecoding(choice=generate_pb2.Choices(texts=choice))
    if grammar is not None:
        return generate_pb2.GuidedDecoding(grammar=grammar)
    assert regex is not None
    return generate_pb2.GuidedDecoding(regex=regex)
