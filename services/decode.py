"""DecodeService: runs a request to its end, from a handoff or from the prompt."""

from contextlib import aclosing
from typing import Any

from baton.engine.v1 import decode_pb2, decode_pb2_grpc
from grpc import aio

from rpc.tracing.span import current_span
from services import convert, convert_media
from services.calls import Calls
from services.clock import CallClock
from services.decoding import Decoder, Work
from services.identity import Identity
from services.resolving import MediaResolver

Context = aio.ServicerContext[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """The decode role of a worker."""

    def __init__(self, identity: Identity, calls: Calls, media: MediaResolver, decoder: Decoder) -> None:
        self._identity = identity
        self._calls = calls
        self._media = media
        self._decoder = decoder

    # Writes instead of yielding: a call that is stopped while it writes is then stopped within `run`.
    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> None:  # type: ignore[override]
        current_span().link(request.handoff.traceparent, "prefill")
        with self._calls.run("decode", request.request_id, request.model, context.invocation_metadata()) as call:
            async with aclosing(self._decoder.decode(await self._work(request, call.clock), call)) as events:
                async for event in events:
                    await context.write(convert.decode_response(self._identity.worker_id, event))

    async def _work(self, request: decode_pb2.DecodeRequest, clock: CallClock) -> Work:
        given, spans = convert.prompt(request), convert_media.spans(request.prompt)
        sampling = convert.sampling(request.sampling)
        if request.HasField("handoff"):
            return Work(self._media.described(given, spans), sampling, convert.handoff(request.handoff))
        return Work(await self._media.computable(given, spans, clock), sampling, handoff=None)
