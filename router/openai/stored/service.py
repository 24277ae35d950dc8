"""Kept responses of a router, as its endpoints need them: run in the background, found, cancelled, gone on from."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import structlog
from typing_extensions import Self

from baton.engine.v1 import resume_pb2
from baton.errors import BatonError, InvalidRequest, RequestNotFound, StreamAdopted, StreamLost, Unavailable
from baton.inference.v1 import generate_pb2
from baton_http2.server.reply import Reply
from router.config import StoredResponsesConfig
from router.context import RequestContext
from router.openai.call import HttpCall
from router.openai.choices import now
from router.openai.errors import PLAIN_NAMES, FieldNames, known_error
from router.openai.fields import read
from router.openai.responses import ResponseBuilder, ResponsesRequest
from router.openai.stored.document import ResponseDocument
from router.openai.stored.table import StoredResponse, StoredResponses
from router.qos import RequestQos
from router.request_path import RequestPath
from router.resume.handle import Handle, owner_sha256
from router.resume.resumer import Resumer
from rpc.auth.caller import current_caller
from rpc.interceptors.calls import message_bytes, record_size
from rpc.timeouts import CLEANUP_SECONDS
from runtime.aio import retrieved, run_to_completion, timeout, wait_until_done
from runtime.clock import monotonic

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

ID_PREFIX = "resp_"
# A response in the background that is refused in this time is refused as any other; later it has failed.
_REFUSED_SECONDS = 0.5
_ADOPTED_SECONDS = 5.0
_CANCELLED_SECONDS = 5.0
_CANCELLED_AGAIN_SECONDS = 0.5  # a cancellation may be lost to a task that ends its own wait just then
_MANY_BYTES = 64 * 1024  # copying more of a conversation is left to a thread


@dataclass(frozen=True, slots=True)
class Owner:
    """The caller and the tenant that a response belongs to."""

    digest: bytes
    qos: RequestQos


class ResponseService:
    """Keeps responses. An asynchronous context manager: leaving it leaves those that run to other routers."""

    def __init__(self, path: RequestPath, config: StoredResponsesConfig) -> None:
        self.table = StoredResponses(config, monotonic)
        self._path = path
        self._config = config
        self._resumer = Resumer(path.contexts, path.pipeline)
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in their order, which is that of their ends
        self._adopting: dict[str, asyncio.Task[StoredResponse]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if not await run_to_completion(_ended(self._tasks)):
            log.warning("responses did not end when cancelled", responses=len(self._tasks))

    def owner(self, call: HttpCall) -> Owner:
        """The owner of what this call makes. Raises InvalidRequest for wrong metadata."""
        caller, qos = current_caller(), self._path.contexts.read_qos(call)
        return Owner(owner_sha256(caller.name if caller else "", qos.tenant), qos)

    async def go_on(
        self, call: HttpCall, body: ResponsesRequest, request: generate_pb2.GenerateRequest
    ) -> Sequence[generate_pb2.ChatMessage]:
        """Puts the conversation before the request's own turns, which are returned. Raises InvalidRequest."""
        turns = list(request.chat.messages)[1 if body.instructions else 0 :]
        before: Sequence[StoredResponse] = ()
        if body.previous_response_id is not None:
            before = self.table.chain(body.previous_response_id, self.owner(call).digest)
        size = message_bytes() + sum(one.size for one in before)
        record_size(size)
        if size > _MANY_BYTES:
            return await asyncio.to_thread(put_before, request, before, turns)
        return put_before(request, before, turns)

    def recording(
        self,
        call: HttpCall,
        body: ResponsesRequest,
        turns: Sequence[generate_pb2.ChatMessage],
        builder: ResponseBuilder,
    ) -> ResponseDocument:
        """The document of a response that ends with its call; it is kept then, if `store` asks for it."""
        document = ResponseDocument(builder, body.model)
        if body.store:
            owner, previous = self.owner(call), body.previous_response_id or ""
            entry = StoredResponse(builder.identity, owner.digest, owner.qos.tenant, document, turns, previous)
            self.table.require_room(entry)
            document.ended = partial(self._keep, entry)
        return document

    def _keep(self, entry: StoredResponse) -> None:
        if entry.document.status in ("completed", "incomplete"):
            with suppress(InvalidRequest):  # its answer was too long: nothing is kept of it
                self.table.add(entry)

    # In the background.

    async def begin(
        self,
        call: HttpCall,
        body: ResponsesRequest,
        request: generate_pb2.GenerateRequest,
        turns: Sequence[generate_pb2.ChatMessage],
    ) -> StoredResponse:
        """Begins a response in the background. Raises what refuses it at once."""
        request.response.ClearField("stream_tool_calls")
        request.response.keep.FromNanoseconds(int(self._config.keep_seconds * 1e9))
        ctx, created = self._path.contexts.create(request, call), now()
        assert ctx.keep is not None
        is_large = len(body.shown) > _MANY_BYTES
        origin = await asyncio.to_thread(_origin, body, created) if is_large else _origin(body, created)
        ctx = replace(ctx, keep=replace(ctx.keep, origin=origin))
        assert ctx.keep is not None
        identity, owner = f"{ID_PREFIX}{ctx.keep.handle.text}", self.owner(call)
        document = ResponseDocument(ResponseBuilder(body, identity, created), request.model)
        entry = StoredResponse(
            identity,
            owner.digest,
            owner.qos.tenant,
            document,
            turns,
            previous=body.previous_response_id or "",
            is_background=True,
        )
        self.table.add(entry)
        failed = self._start(entry, partial(self._pipeline_run, ctx, document), call.names)
        with suppress(TimeoutError):
            async with timeout(_REFUSED_SECONDS):
                while not document.has_started:
                    await document.change()
        if failed and not document.handle:
            self.table.drop(entry)
            raise failed[0]
        return entry

    def _pipeline_run(self, ctx: RequestContext, document: ResponseDocument) -> Coroutine[Any, Any, None]:
        return self._path.pipeline.run(ctx, Reply(document.send, lambda _trailer: None))

    def _start(
        self, entry: StoredResponse, work: Callable[[], Coroutine[Any, Any, Any]], names: FieldNames
    ) -> list[BatonError]:
        """Runs the work of an entry in its own task. Its error will be in the list that is returned."""
        failed: list[BatonError] = []

        async def run() -> None:
            try:
                await work()
            except StreamAdopted:
                self.table.drop(entry)
                entry.document.leave()
            except Exception as error:  # whatever it is, the response tells of it
                failed.append(known_error("/openai/v1/responses", error))
                entry.document.fail(failed[0], names)
            finally:
                self.table.update(entry)

        entry.task = self._create_task(run())
        return failed

    def _create_task(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """A task that ends with this service. Its error is not logged as lost if no call waits for it any more."""
        task = retrieved(asyncio.create_task(work))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    # By their ids.

    async def find(self, identity: str, call: HttpCall) -> StoredResponse:
        """A response of the caller, here or, if a decode worker has it, from there. Raises RequestNotFound."""
        owner = self.owner(call)
        try:
            return self.table.get(identity, owner.digest)
        except RequestNotFound:
            handle = _handle_of(identity)
            if handle is None:
                raise
        # Of several calls the first adopts it; each checks its own right, which the worker does for the first.
        key = f"{identity}/{owner.digest.hex()}"
        if key not in self._adopting:
            self._adopting[key] = self._create_task(self._adopt(identity, handle, owner, call))
            self._adopting[key].add_done_callback(lambda _task: self._adopting.pop(key, None))
        return await asyncio.shield(self._adopting[key])

    async def _adopt(self, identity: str, handle: Handle, owner: Owner, call: HttpCall) -> StoredResponse:
        found: asyncio.Future[StoredResponse] = asyncio.get_running_loop().create_future()
        message = generate_pb2.ResumeGenerationRequest(handle=handle.text)

        def reply_to(record: resume_pb2.ResumeRecord) -> Reply:
            entry = _entry_of(record, identity, owner)
            self.table.add(entry)
            found.set_result(entry)
            return Reply(entry.document.send, lambda _trailer: None)

        adopting = self._create_task(self._resumer.adopt(message, call, reply_to))
        try:
            await asyncio.wait((adopting, found), timeout=_ADOPTED_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not found.done():
                adopting.cancel()
        if not found.done():
            return await _not_found(adopting)
        entry = found.result()
        self._start(entry, partial(_awaited, adopting), PLAIN_NAMES)
        with suppress(TimeoutError):
            async with timeout(_ADOPTED_SECONDS):
                while not entry.document.has_started:
                    await entry.document.change()
        # Its ids so far come as one message after the first.
        await asyncio.sleep(0)
        return entry

    async def cancel(self, entry: StoredResponse, call: HttpCall) -> None:
        """Ends a response in the background; nothing if it has ended. Raises InvalidRequest for any other."""
        if not entry.is_background:
            raise InvalidRequest.of("response_id", "is not of a response in the background: only these are cancelled")
        if entry.document.has_ended:
            return
        entry.document.cancel()
        await self._stop(entry)
        if handle := entry.document.handle:
            with suppress(StreamLost, Unavailable):
                await self._resumer.cancel(Handle.parse(handle), self.owner(call).qos)
        self.table.update(entry)

    async def delete(self, entry: StoredResponse, call: HttpCall) -> None:
        """Forgets a response, on this router and on the worker that keeps it."""
        handle = entry.document.handle
        if entry.is_background and not entry.document.has_ended:
            await self.cancel(entry, call)
        elif entry.is_background and handle:
            with suppress(StreamLost, Unavailable):
                await self._resumer.cancel(Handle.parse(handle), self.owner(call).qos)
        self.table.drop(entry)

    async def _stop(self, entry: StoredResponse) -> None:
        if entry.task is not None:
            entry.task.cancel()
            await asyncio.wait((entry.task,), timeout=_CANCELLED_SECONDS)


async def _ended(tasks: "dict[asyncio.Task[Any], None]") -> bool:
    """Cancels tasks, which may start others as they end. False if some have not ended in time."""
    with suppress(TimeoutError):
        async with timeout(CLEANUP_SECONDS):
            while tasks:
                for task in tuple(tasks):
                    task.cancel()
                await asyncio.wait(tuple(tasks), timeout=_CANCELLED_AGAIN_SECONDS)
    return not tasks


async def _awaited(task: "asyncio.Task[bool]") -> None:
    """The end of a task, which is cancelled with the one that waits."""
    try:
        await task
    except asyncio.CancelledError:
        task.cancel()
        await wait_until_done(task)
        raise


async def _not_found(adopting: "asyncio.Task[bool]") -> StoredResponse:
    await wait_until_done(adopting)
    try:
        with suppress(StreamLost, asyncio.CancelledError):
            adopting.result()
    finally:
        del adopting  # its error has this frame
    raise RequestNotFound("no such response is kept, here or on a decode worker")


def _handle_of(identity: str) -> Handle | None:
    try:
        return Handle.parse(identity.removeprefix(ID_PREFIX)) if identity.startswith(ID_PREFIX) else None
    except InvalidRequest:
        return None


def _entry_of(record: resume_pb2.ResumeRecord, identity: str, owner: Owner) -> StoredResponse:
    """The entry of a response that was made by another router. Raises StreamLost if it was none."""
    if not record.origin:
        raise StreamLost("the answer is no response in the background")
    origin = json.loads(record.origin)
    body = read(ResponsesRequest, {**origin["body"], "input": ""})
    document = ResponseDocument(ResponseBuilder(body, identity, origin["created"]), record.started.model)
    return StoredResponse(identity, owner.digest, owner.qos.tenant, document, turns=None, is_background=True)


def _origin(body: ResponsesRequest, created: int) -> bytes:
    given = body.model_dump(exclude={"input"}, exclude_none=True)
    return json.dumps({"created": created, "body": given}).encode()


def put_before(
    request: generate_pb2.GenerateRequest,
    before: Sequence[StoredResponse],
    turns: Sequence[generate_pb2.ChatMessage],
) -> Sequence[generate_pb2.ChatMessage]:
    """Puts a conversation before the turns, of which it returns copies: a part would keep all of its request."""
    copies = [_copied(turn) for turn in turns]
    if before:
        instructions = [
            _copied(turn) for turn in list(request.chat.messages)[: len(request.chat.messages) - len(turns)]
        ]
        del request.chat.messages[:]
        request.chat.messages.extend([*instructions, *(turn for one in before for turn in one.conversation), *copies])
    return copies


def _copied(turn: generate_pb2.ChatMessage) -> generate_pb2.ChatMessage:
    copy = generate_pb2.ChatMessage()
    copy.CopyFrom(turn)
    return copy
