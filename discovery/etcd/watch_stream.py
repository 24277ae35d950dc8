"""One watch on one member of etcd."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from grpc import aio

from baton.errors import Unavailable
from baton.etcd.v1 import watch_pb2
from runtime.aio import timeout


class WatchStream:
    """The events of a watch. A member that is silent for `quiet_seconds` is probed, and has as long to answer.

    Every method raises Unavailable when the watch cannot continue, and AioRpcError when the stream fails. The caller
    owns `call`, and cancels it.
    """

    def __init__(
        self, call: "aio.StreamStreamCall[watch_pb2.WatchRequest, watch_pb2.WatchResponse]", *, quiet_seconds: float
    ) -> None:
        self._call = call
        self._quiet_seconds = quiet_seconds

    async def create(self, request: watch_pb2.WatchCreateRequest, cluster_id: int, revision: int) -> None:
        """Starts the watch after `revision` of the cluster that was listed.

        A member at an earlier revision may have lost its data: it would be silent until it reaches the revision again,
        and the events before that would be missed.
        """
        await self._write(watch_pb2.WatchRequest(create_request=request))
        created = await self._read()
        _raise_if_canceled(created)
        if created.header.cluster_id != cluster_id:
            raise Unavailable("the member belongs to a different cluster than the one that was listed")
        if created.header.revision < revision:
            raise Unavailable(f"the member is at revision {created.header.revision}, behind the listed {revision}")

    async def events(self) -> AsyncIterator[Sequence[watch_pb2.Event]]:
        """Yields the events, in order. A response without events only shows that the member is alive."""
        while True:
            response = await self._read()
            _raise_if_canceled(response)
            if response.events:
                yield response.events

    async def _read(self) -> watch_pb2.WatchResponse:
        reading = asyncio.ensure_future(self._call.read())
        try:
            if not await self._done(reading):
                await self._write(watch_pb2.WatchRequest(progress_request=watch_pb2.WatchProgressRequest()))
                if not await self._done(reading):
                    raise Unavailable(f"the watch was silent for {2 * self._quiet_seconds:g} s")
            response = reading.result()
        finally:
            reading.cancel()
        if not isinstance(response, watch_pb2.WatchResponse):
            raise Unavailable("etcd ended the watch")
        return response

    async def _done(self, reading: "asyncio.Future[object]") -> bool:
        # Not wait_for: cancelling a read cancels the whole call.
        done, _ = await asyncio.wait({reading}, timeout=self._quiet_seconds)
        return bool(done)

    async def _write(self, request: watch_pb2.WatchRequest) -> None:
        try:
            async with timeout(self._quiet_seconds):
                await self._call.write(request)
        except TimeoutError:
            raise Unavailable(f"the watch did not accept a request for {self._quiet_seconds:g} s") from None
        except asyncio.InvalidStateError as error:
            raise Unavailable("etcd ended the watch") from error


def _raise_if_canceled(response: watch_pb2.WatchResponse) -> None:
    if response.compact_revision:
        raise Unavailable(f"the watch's start was compacted, up to revision {response.compact_revision}")
    if response.canceled:
        raise Unavailable(f"etcd cancelled the watch: {response.cancel_reason}")
