"""Requests from tensors and parameters, and responses as tensors.

| input | type | |
|---|---|---|
| `text_input` | BYTES [1] | the prompt |
| `stream` | BOOL [1] | optional; ModelInfer refuses true, ModelStreamInfer streams in any case |
| `sampling_parameters` | BYTES [1] | optional: parameters as a JSON object, as Triton's vLLM backend takes them |

Outputs are `text_output` and `finish_reason`, BYTES [n], of n answers. The parameters of a request are those of
PARAMETERS. Embeddings are in embeddings.py.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, sampling_pb2
from baton.kserve import inference_pb2 as pb
from baton.sampling_options import OPTIONS
from grammars.guide import MAX_TEXT_BYTES
from router.text.json_values import WrongValue, load_unique_json

OUTPUTS = ("text_output", "finish_reason")
EMBEDDING = "embedding"
VERSION = "1"
FINAL = "triton_final_response"
_IDS = 2**32  # as many as the field of an id can hold
# Fields of GenerateRequest by the name of a parameter.
PARAMETERS: Mapping[str, tuple[str, str]] = {
    **{name: ("sampling", one.name) for one in OPTIONS.values() for name in (one.name, *one.row.kserve)},
    "n": ("sampling", "n"),
    **{name: ("stopping", name) for name in ("max_tokens", "min_tokens", "ignore_eos", "include_stop")},
    "stop": ("stopping", "stop"),
    "stop_words": ("stopping", "stop"),
    "stop_token_ids": ("stopping", "stop_token_ids"),
    "include_stop_str_in_output": ("stopping", "include_stop"),
    "logit_bias": ("sampling", "logit_bias"),
    "bad_words": ("sampling", "bad_words"),
    "session_key": ("routing", "session_key"),
    "cache_salt": ("routing", "cache_salt"),
    "guided_json": ("guided", "json_schema"),
    "guided_regex": ("guided", "regex"),
    "guided_grammar": ("guided", "grammar"),
    "guided_choice": ("guided", "choice"),
    "guided_structural_tags": ("guided", "structural_tags"),
}
# Fields that hold several values. As parameters, which cannot, they are the text of JSON.
_TEXT_LISTS = ("stop", "bad_words")
_FLAGS = ("ignore_eos", "include_stop")
# What Triton's clients may add by themselves.
_OF_CLIENTS = ("triton_enable_empty_final_response", "binary_data_output", "binary_data")
_TYPES = {"text_input": "BYTES", "sampling_parameters": "BYTES", "stream": "BOOL"}
_MAX_ELEMENTS = 4096
_REASONS = {sampling_pb2.FINISH_REASON_LENGTH: "length"}


def generate_request(request: pb.ModelInferRequest, *, may_stream: bool) -> generate_pb2.GenerateRequest:
    """The request to the pipeline. Raises InvalidRequest naming the wrong input or parameter."""
    check_version(request.model_version)
    inputs = {name: _one(name, elements) for name, elements in read_inputs(request).items()}
    made = generate_pb2.GenerateRequest(request_id=request.id, model=request.model_name)
    if "text_input" not in inputs:
        raise InvalidRequest.of("inputs.text_input", "is missing")
    made.prompt = text_of("inputs.text_input", inputs.pop("text_input"))
    if any(inputs.pop("stream", b"")) and not may_stream:
        raise InvalidRequest.of("inputs.stream", "ModelInfer answers as a whole: call ModelStreamInfer")
    given: set[tuple[str, str]] = set()
    if "sampling_parameters" in inputs:
        _set_all(made, "inputs.sampling_parameters", _json(inputs.pop("sampling_parameters")), given)
    if inputs:
        expected = "expected text_input, stream, sampling_parameters"
        raise InvalidRequest.of(f"inputs.{min(inputs)}", f"unknown input; {expected}")
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise InvalidRequest.of(
                f"outputs.{output.name}", f"unknown output; expected {', '.join(OUTPUTS)} or {EMBEDDING}"
            )
        check_tensor_parameters(f"outputs.{output.name}", output.parameters)
    _set_all(made, "parameters", parameters_of(request), given)
    return made


def check_version(version: str) -> None:
    """Raises InvalidRequest for a version of a model that is not there: each model has one."""
    if not is_version(version):
        raise InvalidRequest.of("model_version", f"is {version!r}; a model has the version {VERSION} only")


def is_version(version: str) -> bool:
    """True if a model has this version; an empty one stands for any."""
    return version in ("", VERSION)


def check_tensor_parameters(path: str, parameters: Mapping[str, pb.InferParameter]) -> None:
    """Raises InvalidRequest for the parameters of a tensor, such as classification or a shared memory region."""
    for name in parameters:
        if name not in _OF_CLIENTS:
            raise InvalidRequest.of(f"{path}.parameters.{name}", "is not supported: tensors have no parameters")


def parameters_of(request: pb.ModelInferRequest) -> dict[str, Any]:
    """The parameters that a user has set."""
    return {name: _value(one) for name, one in request.parameters.items() if name not in _OF_CLIENTS}


def response(
    request: pb.ModelInferRequest, texts: Sequence[str], reasons: Sequence[str], *, model: str, is_final: bool
) -> pb.ModelInferResponse:
    """A response with the requested outputs; both if none was named."""
    made = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=request.id)
    made.parameters[FINAL].bool_param = is_final
    wanted = {output.name for output in request.outputs} or OUTPUTS
    for name, values in zip(OUTPUTS, (texts, reasons), strict=True):
        if name in wanted:
            made.outputs.add(name=name, datatype="BYTES", shape=[len(values)])
            made.raw_output_contents.append(b"".join(_packed(value.encode()) for value in values))
    return made


def add_usage(made: pb.ModelInferResponse, usage: generate_pb2.Usage) -> None:
    """Adds the numbers of tokens as parameters."""
    made.parameters["prompt_tokens"].int64_param = usage.prompt_tokens
    made.parameters["completion_tokens"].int64_param = usage.completion_tokens


def reason_of(reason: sampling_pb2.FinishReason.ValueType) -> str:
    """The reason for an answer's end: `stop` or `length`."""
    return _REASONS.get(reason, "stop")


def read_inputs(request: pb.ModelInferRequest) -> dict[str, list[bytes]]:
    """The elements of each input. Raises InvalidRequest."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest.of("raw_input_contents", f"has {len(raw)} items for {len(request.inputs)} inputs")
    found: dict[str, list[bytes]] = {}
    for index, tensor in enumerate(request.inputs):
        path = f"inputs.{tensor.name}"
        if tensor.name in found:
            raise InvalidRequest.of(path, "is given twice")
        if raw and tensor.contents.ByteSize():
            raise InvalidRequest.of(f"{path}.contents", "is set beside raw_input_contents")
        check_tensor_parameters(path, tensor.parameters)
        if (expected := _TYPES.get(tensor.name, tensor.datatype)) != tensor.datatype:
            raise InvalidRequest.of(path, f"has the type {tensor.datatype!r}; expected {expected}")
        if tensor.datatype == "BYTES":
            found[tensor.name] = _unpacked(path, raw[index]) if raw else list(tensor.contents.bytes_contents)
        elif tensor.datatype == "BOOL":
            contents = raw[index] if raw else bytes(tensor.contents.bool_contents)
            found[tensor.name] = [contents[at : at + 1] for at in range(min(len(contents), _MAX_ELEMENTS))]
        else:
            raise InvalidRequest.of(path, f"has the type {tensor.datatype!r}; expected BYTES or BOOL")
        count = len(found[tensor.name])
        if tensor.shape and math.prod(tensor.shape) != count:
            raise InvalidRequest.of(path, f"has the shape {list(tensor.shape)} and {count} elements")
    return found


def _unpacked(path: str, raw: bytes) -> list[bytes]:
    """The elements of a BYTES tensor: each is its length, 4 bytes with the least significant first, and its bytes."""
    found: list[bytes] = []
    position = 0
    while position < len(raw):
        begin = position + 4
        position = begin + struct.unpack_from("<I", raw, position)[0] if begin <= len(raw) else len(raw) + 1
        if position > len(raw):
            raise InvalidRequest.of(path, "must have elements that are each a length in 4 bytes, then as many bytes")
        if len(found) == _MAX_ELEMENTS:
            raise InvalidRequest.of(path, f"has more than {_MAX_ELEMENTS} elements")
        found.append(raw[begin:position])
    return found


def _one(name: str, elements: list[bytes]) -> bytes:
    if len(elements) != 1:
        raise InvalidRequest.of(f"inputs.{name}", "must have one element: send one prompt a request")
    return elements[0]


def _packed(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def text_of(path: str, element: bytes) -> str:
    """An element as text. Raises InvalidRequest."""
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise InvalidRequest.of(path, "is not valid UTF-8") from None


def _json(element: bytes) -> dict[str, Any]:
    try:
        value = load_unique_json(element)
    except WrongValue as error:
        raise InvalidRequest.of(f"inputs.sampling_parameters.{error.path}", error.problem) from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest.of("inputs.sampling_parameters", "must be the text of a JSON object")
    return value


def _value(parameter: pb.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, kind) if kind else None


def _set_all(
    made: generate_pb2.GenerateRequest, path: str, values: Mapping[str, Any], given: set[tuple[str, str]]
) -> None:
    """Sets the fields of parameters, and adds them to `given`: none may be there before, perhaps by another name."""
    for name, value in values.items():
        if name not in PARAMETERS:
            raise InvalidRequest.of(f"{path}.{name}", f"unknown parameter; expected one of {', '.join(PARAMETERS)}")
        section, field = PARAMETERS[name]
        if (section, field) in given:
            raise InvalidRequest.of(f"{path}.{name}", f"{section}.{field} is given twice")
        given.add((section, field))
        try:
            if section == "guided":
                _guide(made, field, value)
            else:
                _set(getattr(made, section), field, value)
        except (TypeError, ValueError, OverflowError, RecursionError, json_format.ParseError) as error:
            raise InvalidRequest.of(f"{path}.{name}", str(error)) from None


def _set(message: Any, field: str, value: Any) -> None:
    """Sets a field. Raises TypeError and ValueError for a value that it cannot hold."""
    if field in _TEXT_LISTS:
        getattr(message, field).extend(_texts(value))
    elif field == "stop_token_ids":
        ids = _list(value, int, "whole numbers")
        if not all(0 <= one < _IDS for one in ids):
            raise ValueError("must be a JSON list of token ids")
        message.stop_token_ids.extend(ids)
    elif field == "logit_bias":
        biases = _parsed(value)
        if not isinstance(biases, dict):
            raise TypeError("must be a JSON object of biases by token id")
        for token_id, bias in biases.items():
            is_id = token_id.isascii() and token_id.isdecimal() and len(token_id) <= 10 and int(token_id) < _IDS
            if not is_id or type(bias) not in (int, float):
                raise TypeError("must be a JSON object of biases by token id")
            message.logit_bias[int(token_id)] = bias
    else:
        assign(message, field, value, is_flag=field in _FLAGS)


def assign(message: Any, field: str, value: Any, *, is_flag: bool = False) -> None:
    """Sets a field of one value. Raises TypeError for one that it cannot hold."""
    try:
        if isinstance(value, bool) != is_flag:
            raise TypeError
        setattr(message, field, value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"cannot be {json.dumps(value)[:80]}") from None


def _guide(made: generate_pb2.GenerateRequest, field: str, value: Any) -> None:
    """Sets what the answer follows. Raises as _set."""
    if made.guided.WhichOneof("guide"):
        raise ValueError("an answer follows one grammar")
    if field == "choice":
        texts = _list(value, str, "texts")
        made.guided.choice.SetInParent()
        made.guided.choice.texts.extend(texts)
    elif field == "structural_tags":
        made.guided.structural_tags.SetInParent()
        json_format.ParseDict(_parsed(value), made.guided.structural_tags)
    elif field == "json_schema" and isinstance(value, dict):
        made.guided.json_schema = json.dumps(value, ensure_ascii=False)
    else:
        assign(made.guided, field, value)


def _parsed(value: Any) -> Any:
    """A value of several parts: as it is, or as JSON."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_TEXT_BYTES:
        raise ValueError(f"has {len(value)} characters of at most {MAX_TEXT_BYTES}")
    try:
        return load_unique_json(value)
    except WrongValue:
        raise
    except (ValueError, RecursionError):
        raise ValueError("must be the text of JSON") from None


def _list(value: Any, kind: type, words: str) -> list[Any]:
    """A list, as it is or as JSON. Raises TypeError, also if an element is of another kind."""
    several = _parsed(value)
    if not isinstance(several, list) or not all(type(one) is kind for one in several):
        raise TypeError(f"must be a JSON list of {words}")
    return several


def _texts(value: Any) -> list[str]:
    """A text, or a list of them as it is or as JSON: a text that begins with a bracket and is JSON is a list."""
    if isinstance(value, str) and not _is_json_list(value):
        return [value]
    return _list(value, str, "texts")


def _is_json_list(text: str) -> bool:
    if not text.lstrip().startswith("["):
        return False
    try:
        return isinstance(_parsed(text), list)
    except ValueError:
        return False
