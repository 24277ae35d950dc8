"""Clients: they ask, read, leave, cancel, read slowly, lose connections and resume, and send again."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from grpc import StatusCode, aio

from baton.connection.credentials import TENANT_KEY
from baton.connection.retry import Resume
from baton.error_details import from_rpc_error
from baton.generation.resuming import Received
from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1 import inference_service_pb2_grpc
from router.resume.handle import Handle
from simulation.channel import SimulatedChannel
from simulation.entropy import Time
from simulation.facades import HttpCall, KServeCall, KServeStream
from simulation.guided import GUIDED
from simulation.plan import CLIENTS, Request
from simulation.reference import picture_of, prompt_of, text_of

_PAUSE_SECONDS = 0.3
_STALL_SECONDS = 0.3  # after which an answer stands still for its client
_CANCEL_SECONDS = 10.0
_PATIENCE_SECONDS = 2.0
_DECODED = 2  # tokens, of which a decode worker has made one at least, and keeps the answer


@dataclass
class Result:
    """The answer that a client got, and how it ended."""

    asked: Request
    index: int
    started: float
    ids: list[int] = field(default_factory=list)
    text: str = ""
    others: dict[int, tuple[list[int], str]] = field(default_factory=dict)  # the other answers, by their numbers
    sequences: list[int] = field(default_factory=list)
    code: str = ""
    reason: str = ""
    message: str = ""
    finished: Any = None
    ended: float = 0.0
    left: bool = False
    cancelled_at: float | None = None
    resumptions: int = 0
    refusals: list[str] = field(default_factory=list)  # why the answer could not be resumed
    tries: int = 1
    workers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For messages."""
        return f"r{self.index} ({self.code} {self.reason} {self.message[:200]!r})"


class Client:
    """The client of one request."""

    def __init__(self, world: Any, index: int, asked: Request) -> None:
        self._world = world
        self._asked = asked
        self.node = world.nodes[CLIENTS[asked.client]]
        self.result = Result(asked, index, Time.now)
        self.ended: asyncio.Future[None] = world.loop.create_future()
        self.ends_at = Time.now + asked.timeout
        self._call: Any = None
        self._received: Received | None = None
        self._cancelling: Any = None
        self._tasks: list[Any] = []
        self._steps = 0

    @property
    def request_id(self) -> str:
        """The value in the request."""
        return f"r{self.result.index}"

    @property
    def _handle(self) -> str:
        """The handle that it cancels by; empty if it does not, or has none yet."""
        return self._received.handle if self._asked.by_handle and self._received is not None else ""

    async def run(self) -> Result:
        """Asks, and again if it was told to."""
        result, asked = self.result, self._asked
        try:
            while True:
                await self._answer()
                if result.code != "UNAVAILABLE" or result.ids or result.tries > asked.retries:
                    break
                result.tries += 1
                result.sequences.clear()
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            for one in self._tasks:
                if one is not self._cancelling:  # by its handle: that is waited for, whatever became of the answer
                    one.cancel()
        result.ended = Time.now
        self._world.log("end", result.index, result.code, result.reason, result.text)
        return result

    async def _answer(self) -> None:
        result, asked = self.result, self._asked
        resume = Resume(keep_seconds=asked.keep, stall_seconds=2.0) if asked.keep else None
        received = self._received = Received(self._message(), resume)
        ends_at = self.ends_at = Time.now + asked.timeout
        if asked.leave_seconds >= 0:
            self._after(asked.leave_seconds, self._leave)
        if asked.cancel_seconds >= 0:
            self._after(asked.cancel_seconds, self._begin_cancel)
        for seconds in asked.drops:
            self._after(seconds, self._drop)
        if asked.keep:
            self._tasks.append(asyncio.ensure_future(self._watch(received)))
        number = asked.router + result.tries - 1
        while True:
            await self._stream(received, number, ends_at - Time.now)
            if result.code != "DROPPED":
                return
            if asked.by_handle and result.cancelled_at is not None:
                result.code, result.left = "LEFT", True  # it does not resume what it has cancelled
                return
            number += 1
            result.resumptions += 1
            if not received.handle or Time.now >= ends_at:
                result.code = "DEADLINE_EXCEEDED" if received.handle else "LOST"
                return

    async def _stream(self, received: Received, number: int, seconds: float) -> None:
        """One call, to its end: the request, or what resumes it."""
        result = self.result
        method, message = received.next_call()
        name = self._world.plan.fleet.router_names[number % self._world.plan.fleet.routers]
        patience = _PATIENCE_SECONDS if result.index % 2 else 0.0
        channel = SimulatedChannel(
            f"{self._world.address_of(name)}:7070", self._asked.window, patience, self._asked.read_seconds
        )
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        metadata = ((TENANT_KEY, self._asked.tenant),) if self._asked.tenant else None
        arguments = (self._asked, self.request_id, max(0.001, seconds))
        match self._asked.api:
            case "":
                call = getattr(stub, method.partition("/")[2])
                self._call = call(message, timeout=max(0.001, seconds), metadata=metadata)
            case "kserve":
                self._call = KServeCall(channel, *arguments)
            case "kserve_stream":
                self._call = KServeStream(channel, *arguments)
            case _:
                self._call = HttpCall(self._world.address_of(name), *arguments)
        self._dropped = False
        try:
            async for event in self._call:
                self._read(event, received)
                if 0 <= self._asked.leave_after <= len(result.ids):
                    self._leave()
            result.code, result.reason, result.message = "OK", "", ""
        except aio.AioRpcError as error:
            result.code, result.message = error.code().name, str(error.details())
            failure = from_rpc_error(error)
            result.reason = failure.reason
            if method.endswith("ResumeGeneration"):
                result.refusals.append(f"{result.code} {result.reason}")
            if received.pause_after(failure, None) is not None:
                result.code = "DROPPED"
                await asyncio.sleep(_PAUSE_SECONDS)
        except asyncio.CancelledError:
            if not (result.left or self._dropped):
                raise
            result.code = "LEFT" if result.left else "DROPPED"
        finally:
            await channel.close()

    def _read(self, event: pb.GenerateResponse, received: Received) -> None:
        result = self.result
        result.sequences.append(event.sequence)
        # Of several answers one may not have come to a worker that keeps it.
        if event.resumed.recomputed and len(result.ids) >= _DECODED and self._asked.answers == 1:
            result.refusals.append("RECOMPUTED STREAM_LOST")
        if not received.add(event):
            result.sequences.clear()
        if event.token.token_ids:
            self._world.steps.tell("token", result.workers[1] if result.workers else "", self.request_id)
        if event.token.index:
            ids, text = result.others.get(event.token.index, ([], ""))
            result.others[event.token.index] = ([*ids, *event.token.token_ids], text + event.token.text)
        else:
            result.ids += event.token.token_ids
            result.text += event.token.text
        if event.HasField("started"):
            result.workers = (event.started.prefill_worker_id, event.started.decode_worker_id)
        if event.HasField("finished"):
            result.finished = event.finished

    def leave_all(self) -> None:
        """Its process has ended."""
        self.result.code, self.result.left = "LEFT", True
        self.result.cancelled_at = self.result.ended = Time.now
        self._world.log("end", self.result.index, "EXIT", self.result.text)

    # What it does beside reading.

    def step(self, step: str) -> None:
        """A step of this request has happened somewhere."""
        asked = self._asked
        if asked.step != step:
            return
        self._steps += 1
        if self._steps == asked.step_count:
            acts = {"leave": self._leave, "cancel": self._begin_cancel, "drop": self._drop}
            self._tasks.append(
                self.node.loop.call_later(asked.step_delay, acts[asked.step_act], context=self.node.context())
            )

    def _begin_cancel(self) -> None:
        self._tasks.append(asyncio.ensure_future(self._cancel()))
        if self._handle:
            self._cancelling = self._tasks[-1]

    def _after(self, seconds: float, call: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().call_later(seconds, call))

    def _leave(self) -> None:
        if self._call is not None and self.result.finished is None and not self.result.left:
            self.result.left = self._call.cancel()
            self.result.cancelled_at = Time.now

    def _drop(self) -> None:
        if self._call is not None and self.result.finished is None and self._call.cancel():
            self._dropped = True

    async def _watch(self, received: Received) -> None:
        """Takes a router that is silent for one that is lost; an answer may have been given up before."""
        while True:
            await asyncio.sleep(_PAUSE_SECONDS)
            if received.handle and received.silence.seconds > _STALL_SECONDS:
                self.step("stall")
            if received.is_silent():
                self._drop()

    async def _cancel(self) -> None:
        self.result.cancelled_at = Time.now
        names = self._world.plan.fleet.router_names
        handle = self._handle
        # Each other one does so at another router, as a client that has lost its own.
        number = self._asked.router + (self.result.index % 2 if handle else 0)
        name = names[number % len(names)]
        channel = SimulatedChannel(f"{self._world.address_of(name)}:7070")
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        metadata = ((TENANT_KEY, self._asked.tenant),) if self._asked.tenant else None
        try:
            asked = pb.CancelGenerationRequest(request_id="" if handle else self.request_id, handle=handle)
            await stub.CancelGeneration(asked, timeout=_CANCEL_SECONDS, metadata=metadata)
            self._tell_cancelled(handle)
        except aio.AioRpcError as error:
            self._world.log("cancel", self.result.index, error.code().name)
            if error.code() is StatusCode.NOT_FOUND:
                self._tell_cancelled(handle)  # no worker had it; none begins it
        except asyncio.CancelledError:
            self._world.log("cancel", self.result.index, "left")
        finally:
            await channel.close()

    def _tell_cancelled(self, handle: str) -> None:
        for each in self._world.invariants if handle else ():
            each.cancelled(self.result, Handle.parse(handle).call_id)

    def _message(self) -> pb.GenerateRequest:
        asked = self._asked
        message = pb.GenerateRequest(request_id=self.request_id)
        if asked.image:
            message.prompt = text_of(asked)
            message.media.add(data=picture_of(asked), mime_type="image/png")
        else:
            message.token_ids.ids.extend(prompt_of(asked))
        message.sampling.seed = asked.seed
        message.sampling.temperature = 1.0
        if asked.answers > 1:
            message.sampling.n = asked.answers
        message.stopping.max_tokens = asked.tokens
        message.stopping.ignore_eos = True
        if asked.guided:
            message.guided.CopyFrom(GUIDED[asked.guided])
        message.response.min_tokens_per_message = asked.together
        return message
