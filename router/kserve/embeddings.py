"""Embeddings of texts by tensors: one text or several in `text_input`, vectors in `embedding`, FP32 [n, dimensions]."""

from array import array

from baton.errors import InvalidRequest
from baton.inference.v1 import embed_pb2
from baton.kserve import inference_pb2 as pb
from router.kserve.tensors import (
    EMBEDDING,
    FINAL,
    VERSION,
    assign,
    check_tensor_parameters,
    check_version,
    parameters_of,
    read_inputs,
    text_of,
)

_PARAMETERS = ("dimensions", "normalize")


def embed_request(request: pb.ModelInferRequest) -> embed_pb2.EmbedRequest:
    """The request to the pipeline. Raises InvalidRequest naming the wrong input, output or parameter."""
    check_version(request.model_version)
    inputs = read_inputs(request)
    texts = inputs.pop("text_input", None)
    if texts is None:
        raise InvalidRequest.of("inputs.text_input", "is missing")
    if inputs:
        raise InvalidRequest.of(f"inputs.{min(inputs)}", "unknown input of embeddings; expected text_input")
    for output in request.outputs:
        if output.name != EMBEDDING:
            raise InvalidRequest.of(f"outputs.{output.name}", f"no output beside {EMBEDDING}")
        check_tensor_parameters(f"outputs.{output.name}", output.parameters)
    made = embed_pb2.EmbedRequest(request_id=request.id, model=request.model_name)
    for text in texts:
        made.inputs.add(text=text_of("inputs.text_input", text))
    for name, value in parameters_of(request).items():
        if name not in _PARAMETERS:
            raise InvalidRequest.of(f"parameters.{name}", f"unknown parameter; expected {' or '.join(_PARAMETERS)}")
        try:
            assign(made, name, value, is_flag=name == "normalize")
        except TypeError as error:
            raise InvalidRequest.of(f"parameters.{name}", str(error)) from None
    return made


def embed_response(request: pb.ModelInferRequest, embedded: embed_pb2.EmbedResponse) -> pb.ModelInferResponse:
    """The vectors, in the order of the texts. Slow for many long ones: call it in a thread."""
    made = pb.ModelInferResponse(model_name=embedded.model, model_version=VERSION, id=request.id)
    made.parameters[FINAL].bool_param = True
    made.parameters["prompt_tokens"].int64_param = embedded.usage.prompt_tokens
    vectors = [array("f", one.values) for one in embedded.embeddings]
    made.outputs.add(name=EMBEDDING, datatype="FP32", shape=[len(vectors), len(vectors[0])])
    made.raw_output_contents.append(b"".join(vector.tobytes() for vector in vectors))
    return made
