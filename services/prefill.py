"""PrefillService: computes a prompt's KV and holds it for whoever decodes."""

from typing import Any

from baton.engine.v1 import prefill_pb2, prefill_pb2_grpc

from services import convert
from services.calls import Calls
from services.leases import LeaseTable
from services.owner import Owner
from services.prefilling import Prefiller


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """The prefill role of a worker."""

    def __init__(self, owner: Owner, calls: Calls, prefiller: Prefiller, leases: LeaseTable) -> None:
        self._owner = owner
        self._calls = calls
        self._prefiller = prefiller
        self._leases = leases

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> prefill_pb2.PrefillResponse:
        with self._calls.run("prefill", request.request_id, request.model) as call:
            prompt, sampling = convert.prompt(request.prompt), convert.sampling(request.sampling)
            prefilled = await self._prefiller.prefill(request.request_id, prompt, sampling, call)
        if prefilled.lease:
            _free_if_unsent(context, prefilled.lease.handoff_id, self._leases)
        return convert.prefill_response(self._owner, prefilled)


def _free_if_unsent(context: Any, handoff_id: str, leases: LeaseTable) -> None:
    """Frees a handoff at once if its caller goes away before the answer is on its way."""

    def free(ended: Any) -> None:
        if not ended.done():
            leases.discard(handoff_id)

    context.add_done_callback(free)
