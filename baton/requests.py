"""The methods of both clients: the arguments of each, what they mean, and the message that they make.

`Client` and `AsyncClient` take their arguments and docstrings from here, and from `baton.cluster_requests`, by `takes`.
"""

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, get_args

from google.protobuf.message import Message

from baton.connection.settings import CALL_SECONDS
from baton.errors import InvalidRequest
from baton.images import Image, user_message
from baton.inference.v1 import (
    embed_pb2,
    generate_pb2,
    model_pb2,
    record_pb2,
    sampling_pb2,
    server_info_pb2,
    tokenize_pb2,
)
from baton.sampling_options import OPTIONS, SamplingNumbers

if TYPE_CHECKING:
    from typing_extensions import Unpack

# A prompt, or a whole request.
Prompt = generate_pb2.GenerateRequest | str
# A text, or a conversation that the model's chat template renders.
Text = generate_pb2.ChatInput | str

# A text, or its token ids.
EmbedText = str | Sequence[int]

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
Owner = TypeVar("Owner")
Result = TypeVar("Result")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A request, its priority, and how long its answer may take. With a `handle`, its answer is resumed."""

    request: generate_pb2.GenerateRequest
    priority: int
    timeout_seconds: float | None
    handle: str = ""
    is_recorded: bool = False


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[Value]):
    """A call with one response, of which `read` is what the client returns. `method` is `Service/Method`."""

    method: str
    message: Message
    read: Callable[[Any], Value]
    timeout_seconds: float | None
    priority: int = 0
    is_recorded: bool = False


def takes(
    definition: Callable[Arguments, Made],
) -> Callable[[Callable[[Owner, Made], Result]], Callable[Concatenate[Owner, Arguments], Result]]:
    """Gives a method the arguments of `definition`, with its docstring if the method has none.

    The method itself receives what `definition` makes of them.
    """

    def decorate(method: Callable[[Owner, Made], Result]) -> Callable[Concatenate[Owner, Arguments], Result]:
        @functools.wraps(method)
        def call(self: Owner, /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            return method(self, definition(*arguments, **options))

        own, offered = inspect.signature(method), inspect.signature(definition)
        itself = next(iter(own.parameters.values()))
        vars(call)["__signature__"] = own.replace(parameters=[itself, *offered.parameters.values()])
        call.__doc__ = method.__doc__ or (definition.__init__ if inspect.isclass(definition) else definition).__doc__
        return call

    return decorate


def response_of(definition: Callable[..., UnaryCall[Any]]) -> Any:
    """The type that a call of the definition returns."""
    return get_args(inspect.signature(definition).return_annotation)[0]


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


def cancel(
    request_id: str, *, timeout_seconds: float | None = CALL_SECONDS
) -> UnaryCall[list[generate_pb2.CancelReceipt]]:
    """Stops a running request, of any client, and returns what each stage confirmed.

    Raises RequestNotFound if no request of this id runs on the router.
    """
    message = generate_pb2.CancelGenerationRequest(request_id=request_id)
    return UnaryCall("InferenceService/CancelGeneration", message, lambda it: list(it.receipts), timeout_seconds)


def embed(
    inputs: Sequence[EmbedText],
    *,
    model: str = "",
    dimensions: int | None = None,
    normalize: bool | None = None,
    priority: int = 0,
    timeout_seconds: float | None = CALL_SECONDS,
) -> UnaryCall[embed_pb2.EmbedResponse]:
    """Returns a vector for each input: `[list(each.values) for each in response.embeddings]`.

    Args:
        inputs: Texts, or the token ids of texts.
        model: Needed where several models are served.
        dimensions: How many numbers of each vector to return, from its beginning; by default all.
        normalize: Whether vectors are scaled to the length 1; by default as the model says.
        priority: From -10 to 10; where requests wait, higher ones go first.
        timeout_seconds: For the whole call.

    Raises InvalidRequest naming an input that is too long, such as `inputs[2]`: none is cut.
    """
    message = embed_pb2.EmbedRequest(model=model)
    for one in [inputs] if isinstance(inputs, str) else inputs:
        if isinstance(one, str):
            message.inputs.add(text=one)
        else:
            message.inputs.add().token_ids.ids.extend(one)
    set_field(message, "dimensions", dimensions)
    if normalize is not None:
        message.normalize = normalize
    return UnaryCall("InferenceService/Embed", message, whole, timeout_seconds, priority)


def tokenize(text: Text, *, model: str = "", timeout_seconds: float | None = CALL_SECONDS) -> UnaryCall[list[int]]:
    """Returns the token ids of a prompt, or of a conversation (ChatInput), as `generate` would run them."""
    if isinstance(text, str):
        message = tokenize_pb2.TokenizeRequest(model=model, prompt=text)
    else:
        message = tokenize_pb2.TokenizeRequest(model=model, chat=text)
    return UnaryCall("InferenceService/Tokenize", message, lambda it: list(it.token_ids), timeout_seconds)


def detokenize(
    token_ids: Sequence[int],
    *,
    model: str = "",
    keep_special_tokens: bool = False,
    timeout_seconds: float | None = CALL_SECONDS,
) -> UnaryCall[str]:
    """Returns the text of token ids."""
    message = tokenize_pb2.DetokenizeRequest(model=model, token_ids=token_ids, keep_special_tokens=keep_special_tokens)
    return UnaryCall("InferenceService/Detokenize", message, lambda it: str(it.text), timeout_seconds)


def models(*, timeout_seconds: float | None = CALL_SECONDS) -> UnaryCall[list[model_pb2.Model]]:
    """Lists the models that are served, with their limits and the number of their workers."""
    message = model_pb2.ListModelsRequest()
    return UnaryCall("InferenceService/ListModels", message, lambda it: list(it.models), timeout_seconds)


def model(name: str = "", *, timeout_seconds: float | None = CALL_SECONDS) -> UnaryCall[model_pb2.Model]:
    """Returns one model; the name may be empty where only one is served. Raises ModelNotFound."""
    message = model_pb2.GetModelRequest(name=name)
    return UnaryCall("InferenceService/GetModel", message, lambda it: it.model, timeout_seconds)


def server_info(*, timeout_seconds: float | None = CALL_SECONDS) -> UnaryCall[server_info_pb2.GetServerInfoResponse]:
    """Returns what the deployment offers: version, models and their features, limits, engines, façades."""
    message = server_info_pb2.GetServerInfoRequest()
    return UnaryCall("InferenceService/GetServerInfo", message, whole, timeout_seconds)


def records(
    request_id: str, *, timeout_seconds: float | None = CALL_SECONDS
) -> UnaryCall[list[record_pb2.RequestRecord]]:
    """Returns the records of a request of this tenant, the oldest first; for operators, of any tenant's request.

    Raises RequestNotFound if none is kept.
    """
    message = record_pb2.GetRecordsRequest(request_id=request_id)
    return UnaryCall("InferenceService/GetRecords", message, _records, timeout_seconds)


def _records(response: record_pb2.GetRecordsResponse) -> list[record_pb2.RequestRecord]:
    return list(response.records)


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


def whole(response: Value) -> Value:
    """The `read` of a call that returns its response as it is."""
    return response


def set_field(message: Message, field: str, value: float | None, path: str = "") -> None:
    """Sets a field unless the value is None. Raises InvalidRequest naming it."""
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest.of(f"{path}.{field}".lstrip("."), str(error)) from None
