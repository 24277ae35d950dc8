"""The routes of OpenAI's API, and of others beside it, as an ASGI application on the router's own pipeline.

Each call passes through what surrounds gRPC's calls too: it is counted for the drain, logged in one line, traced and
authenticated; an error becomes a response in the shape of its API.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import unquote

import structlog
from opentelemetry.trace import SpanKind

from baton.errors import BatonError, Draining
from baton.inference.v1 import generate_pb2
from baton_http2.input_budget import InputBudget
from baton_http2.server.methods import Behaviour
from baton_http2.turns import CallTurns
from router.drawing.options import find_model
from router.drawing.pipeline import DrawingPipeline
from router.openai import embeddings
from router.openai.call import HttpCall, Receive, Send
from router.openai.chat import ChatCompletionRequest
from router.openai.choices import Answering, ChoiceStream, Kind, TokenText, now, whole
from router.openai.completions import CompletionRequest, EchoedPrompt
from router.openai.embeddings import EmbeddingsRequest, ModelEndpoints
from router.openai.errors import HttpRefusal, failure_of, known_error
from router.openai.exchange import (
    ENDED_BY_DRAIN,
    MODEL_PATH,
    MODELS_PATH,
    AnswerStream,
    Api,
    ApiEndpoints,
    Handler,
    Headers,
    HttpExchange,
    add_session,
    run_stream,
)
from router.openai.fields import SamplingFields
from router.openai.images import ImageCollector, ImagesRequest, ImageStream, preview_steps
from router.openai.responses import ResponseBuilder, ResponsesRequest, ResponseStream
from router.openai.resumable.streams import AskedChoices, ResumableStreams, keep_seconds_of
from router.openai.stored.document import RecordedStream, ResponseDocument
from router.openai.stored.endpoints import CANCEL, CANCEL_PATH, RESPONSE_PATH, StoredEndpoints, stream_events
from router.openai.stored.endpoints import PATH as RESPONSES
from router.openai.stored.service import ID_PREFIX, ResponseService
from router.request_path import RequestPath
from router.stream.collector import UnaryCollector
from router.text import request_input
from router.workers.text_limits import LongestTexts
from rpc.auth.access import Access
from rpc.interceptors.calls import RunningCalls, authorize, record_arrival
from rpc.interceptors.logging import log_call
from rpc.status import code_of
from rpc.tracing.propagation import read_context
from rpc.tracing.span import entered
from rpc.tracing.tracer import Tracer
from runtime.aio import forget_frames
from runtime.entropy import token_hex
from runtime.telemetry.logs import add_log_fields

log = structlog.get_logger(__name__)

OPENAI = Api("/openai", lambda error, call: failure_of(error, call.names), lambda _path, _headers: True)
_UNKNOWN = "/unknown"
_ID_PREFIXES: Mapping[Kind, str] = {"chat": "chatcmpl-", "text": "cmpl-"}


@dataclass(frozen=True, slots=True)
class _Request:
    """A request as the interceptors see it."""

    request_id: str
    path: str


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a route: its handler for each HTTP method, and its name in logs, without the variable parts."""

    name: str
    methods: Mapping[str, Behaviour]


class OpenAIApp:
    """The application, with other APIs `beside` OpenAI's. `running` counts its calls, until their code has ended."""

    def __init__(
        self,
        path: RequestPath,
        *,
        access: Access | None,
        tracer: Tracer,
        texts: LongestTexts,
        max_body_bytes: int,
        input: InputBudget,
        responses: ResponseService,
        beside: Sequence[Callable[[RequestPath, HttpExchange], ApiEndpoints]] = (),
    ) -> None:
        self._path = path
        self._stored = responses
        self._resumable = ResumableStreams(path)
        self._access = access
        self._tracer = tracer
        self._exchange = HttpExchange(path, texts, max_body_bytes, input)
        self._drawing = DrawingPipeline(path)
        models, stored = ModelEndpoints(path.cluster), StoredEndpoints(responses)
        self.running = RunningCalls()
        self._turns = CallTurns()
        own: dict[str, Mapping[str, Handler]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/v1/responses": {"POST": self._responses},
            "/v1/embeddings": {"POST": self._embeddings},
            "/v1/images/generations": {"POST": self._images},
            RESPONSE_PATH: {"GET": stored.retrieve, "DELETE": stored.delete},
            CANCEL_PATH: {"POST": stored.cancel},
            MODELS_PATH: {"GET": models.all},
            MODEL_PATH: {"GET": models.one},
        }
        others = [make(path, self._exchange) for make in beside]
        self._others = [(one.api, self._routes(one.api, one.handlers)) for one in others]
        self._openai = self._routes(OPENAI, own)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Serves one call of ASGI. Returns when the response is complete, or the client has left."""
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected ASGI scope {scope['type']}")
        record_arrival()
        await self._turns.wait()
        call: Any = HttpCall(scope, receive, send)
        target = self._find(scope["path"], call.invocation_metadata())
        # The server sends no body in answer to HEAD.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        behaviour = target.methods.get(method) or target.methods["*"]
        try:
            await behaviour(_Request(call.request_id, unquote(scope["path"])), call)
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            task = asyncio.current_task()
            if sys.version_info >= (3, 11) and task is not None:
                task.uncancel()

    def _find(self, path: str, headers: Headers) -> Target:
        routes = next((routes for api, routes in self._others if api.claims(path, headers)), self._openai)
        if path.startswith(f"{MODELS_PATH}/") and path != f"{MODELS_PATH}/":
            return routes[MODEL_PATH]
        if path.startswith(RESPONSES) and path != RESPONSES and RESPONSE_PATH in routes:
            return routes[CANCEL_PATH if path.endswith(CANCEL) else RESPONSE_PATH]
        return routes.get(path.rstrip("/")) or routes[_UNKNOWN]

    def _routes(self, api: Api, endpoints: Mapping[str, Mapping[str, Handler]]) -> Mapping[str, Target]:
        return {name: self._target(api, name, methods) for name, methods in {**endpoints, _UNKNOWN: {}}.items()}

    def _target(self, api: Api, name: str, methods: Mapping[str, Handler]) -> Target:
        behaviours = {verb: self._surround(api, name, handler) for verb, handler in methods.items()}

        async def refuse(_call: HttpCall, path: str) -> None:
            if methods:
                allowed = ("GET", "HEAD", *set(methods) - {"GET"}) if "GET" in methods else tuple(methods)
                raise HttpRefusal(
                    405, f"{name} expects {' or '.join(methods)}", (b"allow", ", ".join(allowed).encode())
                )
            raise HttpRefusal(404, f"unknown path {path!r}")

        return Target(name, {**behaviours, "*": self._surround(api, name, refuse)})

    def _surround(self, api: Api, name: str, handler: Handler) -> Behaviour:
        method = api.prefix + name

        async def handle(request: Any, call: Any) -> None:
            await handler(call, request.path)

        inner: Behaviour = handle
        if self._access is not None:
            inner = authorize(self._access)(method, inner)
        for wrap in (partial(self._traced, name), partial(_answer_errors, api), log_call, self.running.counted):
            inner = wrap(method, inner)
        return inner

    def _traced(self, route: str, method: str, behaviour: Behaviour) -> Behaviour:
        async def traced(request: Any, call: Any) -> None:
            parent = read_context(call.invocation_metadata())
            if parent is None and not self._tracer.is_on:
                await behaviour(request, call)
                return
            span = self._tracer.begin(method.removeprefix("/"), parent, SpanKind.SERVER)
            add_log_fields(trace_id=span.trace_id)
            span.set({"http.route": route})
            try:
                with entered(span):
                    await behaviour(request, call)
            except BaseException as error:
                span.fail(error)
                raise
            finally:
                span.set({"http.response.status_code": call.response_status})
                span.end()

        return traced

    # The endpoints.

    async def _chat(self, call: HttpCall, _path: str) -> None:
        body, request = await self._exchange.read(call, ChatCompletionRequest, ChatCompletionRequest.generate_request)
        await self._choices(call, body, request, "chat")

    async def _completions(self, call: HttpCall, _path: str) -> None:
        body, request = await self._exchange.read(call, CompletionRequest, CompletionRequest.generate_request)
        if body.echo:
            await self._echoed(call, body, request)
        else:
            await self._choices(call, body, request, "text")

    async def _echoed(self, call: HttpCall, body: CompletionRequest, request: generate_pb2.GenerateRequest) -> None:
        """The prompt with the answer, and with the log probabilities of both."""
        answering = Answering("text", f"cmpl-{call.request_id}", self._token_text(body.model), now())
        collector = UnaryCollector()
        await self._exchange.run(call, request, collector)

        def content() -> bytes:
            made = whole(answering, collector)
            prompt = self._echo(request, answering.token_text)
            prompt.put_before(made, collector.response.token.prompt_logprobs)
            return json.dumps(made).encode()

        await call.respond(200, await asyncio.to_thread(content))

    def _echo(self, request: generate_pb2.GenerateRequest, token_text: TokenText) -> EchoedPrompt:
        model = self._path.cluster.model(request.model)
        ids = request_input.tokenize(request, model)
        if model.tokenizer is None:
            return EchoedPrompt(" ".join(map(str, ids)), ids, token_text)
        return EchoedPrompt(request.prompt or model.tokenizer.decode(ids, keep_special_tokens=True), ids, token_text)

    async def _choices(
        self, call: HttpCall, body: SamplingFields, request: generate_pb2.GenerateRequest, kind: Kind
    ) -> None:
        call.names = body.names
        options = body.stream_options
        seconds = keep_seconds_of(call, options.keep_seconds if options else None, is_stream=bool(body.stream))
        if seconds:
            add_session(call, request)
            asked = AskedChoices(kind, request, self._token_text(body.model), body.wants_usage)
            await self._resumable.run(call, asked, seconds)
            return
        answering = Answering(kind, f"{_ID_PREFIXES[kind]}{call.request_id}", self._token_text(body.model), now())
        if body.stream:
            await self._exchange.run(call, request, ChoiceStream(call, answering, body.wants_usage))
            return
        collector = UnaryCollector()
        await self._exchange.run(call, request, collector)
        await call.respond(200, json.dumps(whole(answering, collector)).encode())

    async def _responses(self, call: HttpCall, _path: str) -> None:
        body, request = await self._exchange.read(call, ResponsesRequest, ResponsesRequest.generate_request)
        call.names = body.names
        body.require_consistent()
        seconds = keep_seconds_of(call, None, is_stream=bool(body.stream))
        turns: Sequence[generate_pb2.ChatMessage] = ()
        if body.uses_memory:
            turns = await self._stored.go_on(call, body, request)
            call.names = replace(call.names, before=len(request.chat.messages) - len(turns))
        if body.background or seconds:
            add_session(call, request)
        if body.background:
            entry = await self._stored.begin(call, body, request, turns)
            if body.stream:
                await stream_events(call, entry)
            else:
                await call.respond(200, entry.document.response())
        elif seconds:
            asked = await self._resumable.response(call, request)
            builder = ResponseBuilder(body, asked.identity, asked.origin.created)
            document = self._stored.recording(call, body, turns, builder)
            await self._resumable.run_response(call, document, asked, seconds)
        elif body.store:
            builder = ResponseBuilder(body, f"{ID_PREFIX}{token_hex(16)}", now())
            await self._whole_or_streamed(call, request, builder, self._stored.recording(call, body, turns, builder))
        else:
            await self._whole_or_streamed(call, request, ResponseBuilder(body, f"{ID_PREFIX}{call.request_id}", now()))

    async def _whole_or_streamed(
        self,
        call: HttpCall,
        request: generate_pb2.GenerateRequest,
        builder: ResponseBuilder,
        document: ResponseDocument | None = None,
    ) -> None:
        collector = None if builder.is_streamed else UnaryCollector()
        stream: AnswerStream | UnaryCollector = collector or ResponseStream(call, builder)
        await self._exchange.run(call, request, RecordedStream(document, stream) if document else stream)
        if collector is not None:
            await call.respond(200, builder.whole(collector))

    async def _embeddings(self, call: HttpCall, _path: str) -> None:
        body, request = await self._exchange.read(call, EmbeddingsRequest, EmbeddingsRequest.embed_request, embeds=True)
        async with call.while_connected():
            response = await self._path.embed_pipeline.run(request, call)
        content = await asyncio.to_thread(embeddings.whole, response, body.encoding_format)
        await call.respond(200, content)

    async def _images(self, call: HttpCall, _path: str) -> None:
        body, request = await self._exchange.read(call, ImagesRequest, ImagesRequest.image_request)
        if not body.stream:
            collector = ImageCollector(body.response_format)
            async with call.while_connected():
                await self._drawing.run(request, call, collector.send)
            await call.respond(200, await asyncio.to_thread(collector.whole))
            return
        rules = find_model(self._path.cluster, body.model).rules
        request.options.preview_steps = preview_steps(body.steps or rules.steps, body.partial_images)
        stream = ImageStream(call, body.partial_images)
        await run_stream(call, stream, self._drawing.run(request, call, stream.send))

    def _token_text(self, name: str) -> Callable[[int], str]:
        """Names the tokens of a model in logprobs. The model is looked up when it is needed: it may not exist."""

        def text(token_id: int) -> str:
            tokenizer = self._path.cluster.model(name).tokenizer
            return tokenizer.decode([token_id], keep_special_tokens=True) if tokenizer else str(token_id)

        return text


def _answer_errors(api: Api, method: str, behaviour: Behaviour) -> Behaviour:
    """A BatonError becomes its response; any other error is logged, and INTERNAL. The only broad `except` of HTTP."""

    async def guarded(request: Any, call: Any) -> None:
        try:
            await behaviour(request, call)
        except Exception as error:
            if call.cancelled():
                # The client has left.
                forget_frames(error)
                return
            try:
                await _respond(api, call, known_error(method, error))
            finally:
                forget_frames(error)
        except asyncio.CancelledError:
            if call.cancelled():
                raise
            # The server's drain is over, and cancels what still runs.
            await _respond(api, call, Draining(ENDED_BY_DRAIN))

    return guarded


async def _respond(api: Api, call: HttpCall, error: BatonError) -> None:
    call.status = code_of(type(error))
    add_log_fields(reason=error.reason, error=error.message)
    failure = api.failure(error, call)
    if call.response_status:
        # Cut off, since the response cannot be completed: the client notices.
        return
    await call.respond(failure.status, failure.body, failure.headers)
