"""GRPCInferenceService, on the same pipeline as InferenceService.

A model's inputs and outputs, for clients that ask before they send.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from baton.errors import BatonError, InvalidRequest, ModelNotFound, NoWorker
from baton.inference.v1 import embed_pb2, generate_pb2, model_pb2
from baton.kserve import inference_pb2 as pb
from baton.version import __version__
from baton_http2.server.reply import Reply
from engine_protocol.roles import completing
from router.kserve.tensors import (
    EMBEDDING,
    FINAL,
    OUTPUTS,
    VERSION,
    add_usage,
    assign,
    check_tensor_parameters,
    check_version,
    generate_request,
    is_version,
    parameters_of,
    read_inputs,
    reason_of,
    response,
    text_of,
)
from router.request_path import RequestPath
from router.stream.collector import UnaryCollector
from router.workers.offer import model_message
from rpc.interceptors.calls import record_arrival, record_size
from rpc.interceptors.counting import count_fields
from runtime.aio import TaskGroup

PLATFORM = "baton"

_TYPES = {"BYTES": pb.TYPE_STRING, "BOOL": pb.TYPE_BOOL, "FP32": pb.TYPE_FP32}
_PARAMETERS = ("dimensions", "normalize")


def metadata(model: model_pb2.Model) -> pb.ModelMetadataResponse:
    """Inputs and outputs, with their types and shapes; -1 is any number."""
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in _inputs(model)],
        outputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in _outputs(model)],
    )


def config(model: model_pb2.Model) -> pb.ModelConfig:
    """The same as Triton's configuration. A model that generates is decoupled: it may answer by several messages."""
    return pb.ModelConfig(
        name=model.name,
        platform=PLATFORM,
        backend=PLATFORM,
        input=[
            pb.ModelInput(name=name, data_type=_TYPES[kind], dims=shape, optional=name != "text_input")
            for name, kind, shape in _inputs(model)
        ],
        output=[pb.ModelOutput(name=name, data_type=_TYPES[kind], dims=shape) for name, kind, shape in _outputs(model)],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=not model.capabilities.embeddings_only),
    )


def _inputs(model: model_pb2.Model) -> list[tuple[str, str, list[int]]]:
    texts = [-1] if model.HasField("embedding") else [1]
    prompt = ("text_input", "BYTES", texts)
    if model.capabilities.embeddings_only:
        return [prompt]
    return [prompt, ("stream", "BOOL", [1]), ("sampling_parameters", "BYTES", [1])]


def _outputs(model: model_pb2.Model) -> list[tuple[str, str, list[int]]]:
    found: list[tuple[str, str, list[int]]] = []
    if not model.capabilities.embeddings_only:
        found += [(name, "BYTES", [-1]) for name in OUTPUTS]
    if model.HasField("embedding"):
        found.append((EMBEDDING, "FP32", [-1, model.embedding.dimensions]))
    return found


Context = aio.ServicerContext[Any, Any]

NAME = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

_MAX_STREAMED_BYTES = 4 * 2**20  # of one request in a stream; they are texts
_MAX_FIELDS = 4096
_SMALL_BYTES = 16 * 1024
_AT_ONCE = 64  # requests of one stream; more wait
_LARGE_TEXTS = 64  # vectors of more are packed in a thread


class KServeServicer:
    """The methods of GRPCInferenceService."""

    def __init__(self, path: RequestPath) -> None:
        self._path = path

    async def ServerLive(self, _request: pb.ServerLiveRequest, _context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _request: pb.ServerReadyRequest, _context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=any(self._is_ready(model.name) for model in self._path.cluster.models))

    async def ModelReady(self, request: pb.ModelReadyRequest, _context: Context) -> pb.ModelReadyResponse:
        with suppress(ModelNotFound, NoWorker):
            model = self._path.cluster.model(request.name).name
            return pb.ModelReadyResponse(ready=is_version(request.version) and self._is_ready(model))
        return pb.ModelReadyResponse(ready=False)

    async def ServerMetadata(self, _request: pb.ServerMetadataRequest, _context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=PLATFORM, version=__version__, extensions=["model_configuration"])

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, _context: Context) -> pb.ModelMetadataResponse:
        return metadata(self._described(request.name, request.version))

    async def ModelConfig(self, request: pb.ModelConfigRequest, _context: Context) -> pb.ModelConfigResponse:
        return pb.ModelConfigResponse(config=config(self._described(request.name, request.version)))

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        if self._wants_vectors(request):
            return await self._embed(request, context)
        made, collector = generate_request(request, may_stream=False), UnaryCollector()
        ctx = self._path.contexts.create(made, context)
        await self._path.pipeline.run(ctx, Reply(collector.send, context.set_trailing_metadata))
        return _whole(request, collector)

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with TaskGroup() as group:
            at_once = asyncio.Semaphore(_AT_ONCE)
            writing = asyncio.Lock()
            async for wire in requests:
                await at_once.acquire()
                running = group.create_task(self._stream(wire, context, writing))
                running.add_done_callback(lambda _: at_once.release())

    async def _stream(self, wire: bytes, context: Any, writing: asyncio.Lock) -> None:
        """Answers one request of a stream. An error is a message: it ends the request, and not the stream."""
        record_arrival()
        record_size(len(wire))
        answer = _StreamedAnswer(context, writing)
        try:
            await answer.read(wire)
            if self._wants_vectors(answer.request):
                await answer.write(await self._embed(answer.request, context))
                return
            ctx = self._path.contexts.create(generate_request(answer.request, may_stream=True), context)
            await self._path.pipeline.run(ctx, Reply(answer.send, lambda _trailer: None))
        except BatonError as error:
            await answer.fail(error)

    async def _embed(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        embedded = await self._path.embed_pipeline.run(embed_request(request), context)
        if len(embedded.embeddings) > _LARGE_TEXTS:
            return await asyncio.to_thread(embed_response, request, embedded)
        return embed_response(request, embedded)

    def _wants_vectors(self, request: pb.ModelInferRequest) -> bool:
        """True if the output `embedding` is wanted: it is named, or the model has no other.

        Which workers happen to run does not decide: without those that generate, a prompt fails.
        """
        if any(output.name == EMBEDDING for output in request.outputs):
            return True
        with suppress(BatonError):  # an unknown model is the pipeline's to refuse
            return self._path.cluster.model(request.model_name).capabilities.embeddings_only
        return False

    def _described(self, name: str, version: str) -> model_pb2.Model:
        check_version(version)
        return model_message(self._path.cluster.model(name), self._path.cluster)

    def _is_ready(self, name: str) -> bool:
        return any(
            worker.record.model == name and completing() & set(worker.record.roles) and not worker.problem
            for worker in self._path.cluster.workers
        )


class _StreamedAnswer:
    """The answer to one request of a stream."""

    def __init__(self, context: Any, writing: asyncio.Lock) -> None:
        self.request = pb.ModelInferRequest()
        self._context = context
        self._writing = writing
        self._model = ""
        self._reasons: dict[int, str] = {}

    async def read(self, wire: bytes) -> None:
        """Parses the request, aside if it is large. Raises InvalidRequest."""
        if len(wire) > _MAX_STREAMED_BYTES:
            raise InvalidRequest.of("request", f"has {len(wire)} bytes of at most {_MAX_STREAMED_BYTES}")
        self.request = await asyncio.to_thread(_parse, wire) if len(wire) > _SMALL_BYTES else _parse(wire)

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Writes the next message of the pipeline; of several answers each with its index as a parameter."""
        match message.WhichOneof("event"):
            case "started":
                self._model = message.started.model
            case "token":
                await self._write(message.token.text, "", message.token.index)
            case "answer_finished":
                end = message.answer_finished
                self._reasons[end.index] = reason_of(end.reason)
                await self._write("", self._reasons[end.index], end.index)
            case "finished":
                reason = "" if self._reasons else reason_of(message.finished.reason)
                await self._write("", reason, 0, message.finished.usage)

    async def fail(self, error: BatonError) -> None:
        """Ends the request."""
        made = pb.ModelInferResponse(id=self.request.id, model_name=self.request.model_name)
        made.parameters[FINAL].bool_param = True
        text = f"[{error.reason}] {error.message}"
        async with self._writing:
            await self._context.write(pb.ModelStreamInferResponse(error_message=text, infer_response=made))

    async def _write(self, text: str, reason: str, index: int, usage: generate_pb2.Usage | None = None) -> None:
        is_final = usage is not None
        made = response(self.request, [text], [reason], model=self._model, is_final=is_final)
        made.parameters["index"].int64_param = index
        if usage is not None:
            add_usage(made, usage)
        await self.write(made)

    async def write(self, made: pb.ModelInferResponse) -> None:
        """Writes a response."""
        async with self._writing:
            await self._context.write(pb.ModelStreamInferResponse(infer_response=made))


def add_kserve(servicer: KServeServicer, server: Any) -> None:
    """Adds the service to a server. Requests in streams arrive unparsed: their parsing has to be bounded."""
    handlers: dict[str, Any] = {}
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        serve, serializer = getattr(servicer, method.name), GetMessageClass(method.output_type).SerializeToString
        if method.name == "ModelStreamInfer":
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(serve, None, serializer)
        else:
            deserializer = GetMessageClass(method.input_type).FromString
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(serve, deserializer, serializer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


def _parse(wire: bytes) -> pb.ModelInferRequest:
    """Raises InvalidRequest for bytes that are no request, and for one with too many fields."""
    try:
        if not count_fields(pb.ModelInferRequest.DESCRIPTOR, wire, _MAX_FIELDS):
            raise DecodeError
        return pb.ModelInferRequest.FromString(wire)
    except DecodeError:
        raise InvalidRequest.of("request", "is not a ModelInferRequest") from None


def _whole(request: pb.ModelInferRequest, collector: UnaryCollector) -> pb.ModelInferResponse:
    collected = collector.response
    answers = [(one.token.text, one.finished.reason) for one in collected.answers] or [
        (collected.token.text, collected.finished.reason)
    ]
    texts, reasons = [text for text, _ in answers], [reason_of(reason) for _, reason in answers]
    made = response(request, texts, reasons, model=collected.started.model, is_final=True)
    add_usage(made, collected.finished.usage)
    return made


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
