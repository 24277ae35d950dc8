"""PrefillService: computes a prompt's KV and holds it for whoever decodes."""

from typing import Any

from baton.engine.v1 import prefill_pb2, prefill_pb2_grpc

from rpc.caller import certificate
from rpc.tracing.span import current_span
from services import convert, convert_media
from services.calls import Calls
from services.leases import LeaseTable
from services.owner import Owner
from services.prefilling import Claim, Prefiller
from services.resolving import MediaResolver
from services.unsent import free_if_unsent


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """The prefill role of a worker."""

    def __init__(
        self, owner: Owner, calls: Calls, media: MediaResolver, prefiller: Prefiller, leases: LeaseTable
    ) -> None:
        self._owner = owner
        self._calls = calls
        self._media = media
        self._prefiller = prefiller
        self._leases = leases

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> prefill_pb2.PrefillResponse:
        with self._calls.run("prefill", request.request_id, request.model, context.invocation_metadata()) as call:
            given, sampling = convert.prompt(request), convert.sampling(request.sampling)
            prompt = await self._media.computable(given, convert_media.spans(request.prompt), call.clock)
            prefilled = await self._prefiller.prefill(_claim(request), prompt, sampling, call)
        if prefilled.lease:
            free_if_unsent(context, [prefilled.lease.handoff_id], self._leases)
        response = convert.prefill_response(self._owner, prefilled)
        response.handoff.traceparent = current_span().traceparent
        return response


def _claim(request: prefill_pb2.PrefillRequest) -> Claim:
    """With certificates, the handoff is for whoever asked for it and for the reader that was named."""
    if not certificate():
        return Claim(request.request_id)
    return Claim(request.request_id, frozenset({certificate(), request.reader} - {""}))
