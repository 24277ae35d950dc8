"""Calls of the router's other APIs, whose events are those of a Generate call: OpenAI's over HTTP/1.1, and KServe's."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httptools
from grpc import StatusCode, aio

from baton.errors import BatonError
from baton.inference.v1 import generate_pb2 as pb
from baton.kserve import inference_pb2, inference_pb2_grpc
from rpc.status import code_of
from simulation.plan import Request
from simulation.reference import letters_of, prompt_of

HTTP_PORT = 8000
_EMPTY_ERROR = {"code": "worker_unavailable", "message": "the connection was lost"}


class HttpCall(asyncio.Protocol):
    """One streamed request for a completion, also of a conversation, on a connection of its own. An asynchronous
    iterator of its events.

    HTTP has no deadlines: at its own the client leaves.
    """

    def __init__(self, host: str, asked: Request, request_id: str, timeout: float) -> None:
        self._asked, self._host = asked, host
        self._request_id = request_id
        self._events: deque[pb.GenerateResponse] = deque()
        self._text = b""
        self._status, self._sequence = 0, 0
        self._error: dict[str, str] | None = None
        self._is_over = self._is_cancelled = False
        self._news = asyncio.Event()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout, self._expire)
        self._task = loop.create_task(self._connect())

    def cancel(self) -> bool:
        """Leaves, if it runs."""
        if self._is_over:
            return False
        self._is_cancelled = True
        self._end()
        return True

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        try:
            while True:
                while not (self._events or self._is_over):
                    self._news.clear()
                    await self._news.wait()
                if self._is_cancelled:
                    raise asyncio.CancelledError
                if not self._events:
                    break
                yield self._events.popleft()
            if self._error is not None:
                raise _rpc_error(self._error)
        finally:
            self._end()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._transport, _ = await loop.create_connection(lambda: self, self._host, HTTP_PORT)
        except OSError as error:
            self._fail({"code": "worker_unavailable", "message": str(error)})
            return
        if self._is_over:
            self._transport.abort()
            return
        path, body = _http_request(self._asked)
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\nx-request-id: {self._request_id}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode())
        self._transport.write(body)

    # What the connection says.

    def data_received(self, data: bytes) -> None:
        if not self._is_over:
            self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(_EMPTY_ERROR)

    def on_status(self, _reason: bytes) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self._text += piece
        while self._status == 200 and b"\n\n" in self._text:
            line, _, self._text = self._text.partition(b"\n\n")
            self._read(line.removeprefix(b"data: "))

    def on_message_complete(self) -> None:
        if self._status != 200:
            self._fail(json.loads(self._text)["error"])
        elif self._error is None:
            self._end()

    def _read(self, line: bytes) -> None:
        if line == b"[DONE]":
            return
        found = json.loads(line)
        if "error" in found:
            self._error = found["error"]
            self._end()
            return
        for event in self._events_of(found):
            event.sequence = self._sequence
            self._sequence += 1
            self._events.append(event)
        self._news.set()

    def _events_of(self, found: dict[str, Any]) -> Iterator[pb.GenerateResponse]:
        for choice in found["choices"]:
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if text:
                yield _token(text)
        if found.get("usage"):
            yield _finished(found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"])

    def _expire(self) -> None:
        self._fail({"code": "deadline_exceeded", "message": "the client has waited long enough"})

    def _fail(self, error: dict[str, str]) -> None:
        if not self._is_over:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._timer.cancel()
        self._news.set()
        if self._transport is not None:
            self._transport.close()


def _http_request(asked: Request) -> tuple[str, bytes]:
    """The path and the body."""
    fields: dict[str, Any] = {
        "max_tokens": asked.tokens, "seed": asked.seed, "temperature": 1.0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "model": "demo",
    }  # fmt: skip
    if asked.api == "chat":
        fields["messages"] = [{"role": "user", "content": letters_of(asked)}]
        return "/v1/chat/completions", json.dumps(fields).encode()
    fields["prompt"] = prompt_of(asked)
    return "/v1/completions", json.dumps(fields).encode()


class KServeCall:
    """One request for a whole answer. An asynchronous iterator of its events."""

    def __init__(self, channel: Any, asked: Request, request_id: str, timeout: float) -> None:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._call = stub.ModelInfer(_kserve_request(asked, request_id), timeout=timeout)

    def cancel(self) -> bool:
        """Leaves, if it runs."""
        return bool(self._call.cancel())

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        for sequence, event in enumerate(_events_of(await self._call)):
            event.sequence = sequence
            yield event


class KServeStream:
    """One request in a stream of its own. An asynchronous iterator of its events. An error is a message."""

    def __init__(self, channel: Any, asked: Request, request_id: str, timeout: float) -> None:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._call = stub.ModelStreamInfer(iter([_kserve_request(asked, request_id)]), timeout=timeout)

    def cancel(self) -> bool:
        """Leaves, if it runs."""
        return bool(self._call.cancel())

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        sequence = 0
        async for message in self._call:
            if message.error_message:
                reason, _, text = message.error_message.removeprefix("[").partition("] ")
                raise _rpc_error({"code": reason.lower(), "message": text})
            for event in _events_of(message.infer_response):
                event.sequence = sequence
                sequence += 1
                yield event


def _kserve_request(asked: Request, request_id: str) -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name="demo", id=request_id)
    text = letters_of(asked).encode()
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    request.parameters["max_tokens"].int64_param = asked.tokens
    request.parameters["seed"].int64_param = asked.seed
    request.parameters["temperature"].double_param = 1.0
    request.parameters["ignore_eos"].bool_param = True
    return request


def _events_of(answer: inference_pb2.ModelInferResponse) -> Iterator[pb.GenerateResponse]:
    index = [output.name for output in answer.outputs].index("text_output")
    if text := answer.raw_output_contents[index][4:].decode():
        yield _token(text)
    if answer.parameters["triton_final_response"].bool_param:
        usage = answer.parameters
        yield _finished(usage["prompt_tokens"].int64_param, usage["completion_tokens"].int64_param)


def _token(text: str) -> pb.GenerateResponse:
    event = pb.GenerateResponse()
    event.token.text = text
    event.token.token_ids.extend(text.encode())
    return event


def _finished(prompt_tokens: int, completion_tokens: int) -> pb.GenerateResponse:
    event = pb.GenerateResponse()
    event.finished.usage.prompt_tokens = prompt_tokens
    event.finished.usage.completion_tokens = completion_tokens
    return event


def _rpc_error(error: dict[str, str]) -> aio.AioRpcError:
    code = _CODES.get(error["code"], StatusCode.UNKNOWN)
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details=error["message"])


def _kinds(kind: type[BatonError]) -> Iterator[type[BatonError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


_CODES = {kind.reason.lower(): code_of(kind) for kind in _kinds(BatonError)}
