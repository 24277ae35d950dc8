"""EncodeService: turns media into embeddings."""

from typing import Any

from baton.engine.v1 import encode_pb2, encode_pb2_grpc

from services import convert_media
from services.calls import Calls
from services.encoding import MediaEncoder
from services.identity import Identity
from services.leases import LeaseTable
from services.unsent import free_if_unsent


class EncodeServicer(encode_pb2_grpc.EncodeServiceServicer):
    """The encode role of a worker. Only a worker without that role has no `encoder`."""

    def __init__(
        self, identity: Identity, calls: Calls, encoder: MediaEncoder | None, leases: LeaseTable, max_items: int
    ) -> None:
        self._identity = identity
        self._calls = calls
        self._encoder = encoder
        self._leases = leases
        self._max_items = max_items

    async def Encode(self, request: encode_pb2.EncodeRequest, context: Any) -> encode_pb2.EncodeResponse:
        with self._calls.run("encode", request.request_id, request.model, context.invocation_metadata()) as call:
            assert self._encoder is not None
            await call.faults.strike("queue")
            await call.faults.strike("encode")
            items = convert_media.media_items(request.media, self._max_items)
            encoded = await self._encoder.encode(request.request_id, items)
        free_if_unsent(context, encoded.handoff_ids, self._leases)
        return convert_media.encode_response(self._identity, encoded)
