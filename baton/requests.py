"""The methods of both clients: the arguments of each, what they mean, and the message that they make.

`Client` and `AsyncClient` take their arguments and docstrings from here, from `baton.generation.requests` and from
`baton.cluster_requests`, by `takes`.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args

from google.protobuf.message import Message

from baton.connection.settings import CALL_SECONDS
from baton.errors import InvalidRequest
from baton.inference.v1 import (
    embed_pb2,
    generate_pb2,
    model_pb2,
    record_pb2,
    server_info_pb2,
    tokenize_pb2,
)

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
    return UnaryCall("InferenceService/GetRecords", message, lambda it: list(it.records), timeout_seconds)


def whole(response: Value) -> Value:
    """The `read` of a call that returns its response as it is."""
    return response


def set_field(message: Message, field: str, value: float | None, path: str = "") -> None:
    """Sets a field; None leaves it unset. Raises InvalidRequest for a value that it cannot hold."""
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest.of(f"{path}.{field}".lstrip("."), str(error)) from None
