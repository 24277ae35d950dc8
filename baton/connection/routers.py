"""The routers of one deployment, of which a client calls one at a time."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message
from grpc import aio

from baton.connection.credentials import Metadata
from baton.errors import Cancelled
from baton.inference.v1 import cluster_service_pb2_grpc, image_pb2_grpc, inference_service_pb2_grpc, video_pb2_grpc


class Routers:
    """A channel to each router. Calls go by the present one; after its loss, `leave` makes the next one present."""

    def __init__(self, channels: Sequence[Any]) -> None:
        self.channels = channels
        self._stubs = [
            {
                "InferenceService": inference_service_pb2_grpc.InferenceServiceStub(channel),
                "ImageService": image_pb2_grpc.ImageServiceStub(channel),
                "VideoService": video_pb2_grpc.VideoServiceStub(channel),
                "ClusterService": cluster_service_pb2_grpc.ClusterServiceStub(channel),
            }
            for channel in channels
        ]
        self._present = 0
        self.is_closed = False  # set before the channels are

    @property
    def present(self) -> int:
        """The number of the one that is called now."""
        return self._present

    def leave(self, present: int) -> None:
        """Calls another one from now on, unless that has happened since `present` was the number."""
        if present == self._present:
            self._present = (present + 1) % len(self.channels)

    def call(
        self, name: str, message: Message, seconds: float | None, metadata: Metadata, router: int | None = None
    ) -> Any:
        """Calls `Service/Method` as the stub does. Raises Cancelled if the client is closed."""
        try:
            return self.method(name, router)(message, timeout=seconds, metadata=metadata)
        except (ValueError, aio.UsageError) as error:  # as channels raise them that are closed
            if not self.is_closed:
                raise
            raise Cancelled("the client is closed") from error

    def method(self, name: str, router: int | None = None) -> Any:
        """The stub of `Service/Method`, of the present router or of one by its number."""
        service, _, method = name.partition("/")
        return getattr(self._stubs[self._present if router is None else router][service], method)
