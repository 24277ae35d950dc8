"""Requests from tensors and parameters, and responses as tensors.

| input | type | |
|---|---|---|
| `text_input` | BYTES [1] | the prompt |
| `stream` | BOOL [1] | optional; ModelInfer refuses true, ModelStreamInfer streams in any case |
| `sampling_parameters` | BYTES [1] | optional: parameters as a JSON object, as Triton's vLLM backend takes them |

Outputs are `text_output` and `finish_reason`, BYTES [n], of n answers. The parameters of a request are those of
PARAMETERS.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, sampling_pb2
from baton.kserve import inference_pb2 as pb

OUTPUTS = ("text_output", "finish_reason")
FINAL = "triton_final_response"
# Fields of GenerateRequest by the name of a parameter.
PARAMETERS: Mapping[str, tuple[str, str]] = {
    **{
        name: ("sampling", name)
        for name in (
            "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "seed", "n",
        )
    },
    **{name: ("stopping", name) for name in ("max_tokens", "min_tokens", "ignore_eos", "include_stop")},
    "stop": ("stopping", "stop"),
    "stop_words": ("stopping", "stop"),
    "random_seed": ("sampling", "seed"),
    "session_key": ("routing", "session_key"),
    "cache_salt": ("routing", "cache_salt"),
    "guided_json": ("guided", "json_schema"),
    "guided_regex": ("guided", "regex"),
    "guided_grammar": ("guided", "grammar"),
}  # fmt: skip
# What Triton's clients may add by themselves.
_OF_CLIENTS = ("triton_enable_empty_final_response", "binary_data_output")
_REASONS = {sampling_pb2.FINISH_REASON_LENGTH: "length"}


def generate_request(request: pb.ModelInferRequest, *, may_stream: bool) -> generate_pb2.GenerateRequest:
    """The request to the pipeline. Raises InvalidRequest naming the wrong input or parameter."""
    inputs = _inputs(request)
    made = generate_pb2.GenerateRequest(request_id=request.id, model=request.model_name)
    made.prompt = _text("text_input", inputs.pop("text_input", None))
    stream = inputs.pop("stream", [b"\x00"])
    if not may_stream and any(any(one) for one in stream):
        raise InvalidRequest.of("inputs.stream", "ModelInfer answers as a whole: call ModelStreamInfer")
    if "sampling_parameters" in inputs:
        _set_all(made, "inputs.sampling_parameters", _json(inputs.pop("sampling_parameters")))
    if inputs:
        expected = "expected text_input, stream, sampling_parameters"
        raise InvalidRequest.of(f"inputs.{min(inputs)}", f"unknown input; {expected}")
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise InvalidRequest.of(f"outputs.{output.name}", f"unknown output; expected {' or '.join(OUTPUTS)}")
    values = {name: _value(one) for name, one in request.parameters.items() if name not in _OF_CLIENTS}
    _set_all(made, "parameters", values)
    return made


def response(
    request: pb.ModelInferRequest, texts: Sequence[str], reasons: Sequence[str], *, model: str, is_final: bool
) -> pb.ModelInferResponse:
    """A response with the requested outputs; both if none was named."""
    made = pb.ModelInferResponse(model_name=model, model_version="1", id=request.id)
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
    """Why an answer ended: `stop` or `length`."""
    return _REASONS.get(reason, "stop")


def _inputs(request: pb.ModelInferRequest) -> dict[str, list[bytes]]:
    """The elements of each input. Raises InvalidRequest."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest.of("raw_input_contents", f"has {len(raw)} items for {len(request.inputs)} inputs")
    found: dict[str, list[bytes]] = {}
    for index, tensor in enumerate(request.inputs):
        path = f"inputs.{tensor.name}"
        if tensor.name in found:
            raise InvalidRequest.of(path, "is there twice")
        if tensor.datatype == "BYTES":
            found[tensor.name] = _unpacked(path, raw[index]) if raw else list(tensor.contents.bytes_contents)
        elif tensor.datatype == "BOOL":
            contents = raw[index] if raw else bytes(tensor.contents.bool_contents)
            found[tensor.name] = [contents[at : at + 1] for at in range(min(len(contents), 2))]
        else:
            raise InvalidRequest.of(path, f"has the type {tensor.datatype!r}; expected BYTES or BOOL")
        if len(found[tensor.name]) != 1:
            raise InvalidRequest.of(path, "must have one element: send one prompt a request")
    return found


def _unpacked(path: str, raw: bytes) -> list[bytes]:
    """The elements of a BYTES tensor: each is its length, 4 bytes with the least significant first, and its bytes."""
    if len(raw) < 4 or struct.unpack_from("<I", raw)[0] != len(raw) - 4:
        raise InvalidRequest.of(path, "must have one element: its length in 4 bytes, then its bytes")
    return [raw[4:]]


def _packed(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def _text(name: str, elements: list[bytes] | None) -> str:
    if elements is None:
        raise InvalidRequest.of(f"inputs.{name}", "is missing")
    try:
        return elements[0].decode()
    except UnicodeDecodeError:
        raise InvalidRequest.of(f"inputs.{name}", "is not valid UTF-8") from None


def _json(elements: list[bytes]) -> dict[str, Any]:
    try:
        value = json.loads(elements[0])
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest.of("inputs.sampling_parameters", "must be the text of a JSON object")
    return value


def _value(parameter: pb.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, kind) if kind else None


def _set_all(made: generate_pb2.GenerateRequest, path: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name not in PARAMETERS:
            raise InvalidRequest.of(f"{path}.{name}", f"unknown parameter; expected one of {', '.join(PARAMETERS)}")
        section, field = PARAMETERS[name]
        message = getattr(made, section)
        try:
            if section == "guided" and made.guided.WhichOneof("guide"):
                raise ValueError("an answer follows one grammar")
            if field == "stop":
                message.stop.extend([value] if isinstance(value, str) else value)
            elif isinstance(value, bool) == (field in ("ignore_eos", "include_stop")):
                setattr(message, field, value)
            else:
                raise TypeError(f"has the wrong type, {type(value).__name__}")
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest.of(f"{path}.{name}", str(error)) from None
