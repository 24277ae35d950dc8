"""ImageService, which clients call."""

from typing import Any

from baton.inference.v1 import image_pb2, image_pb2_grpc
from router.drawing.pipeline import DrawingPipeline
from router.request_path import RequestPath
from rpc.server import Service

NAME = image_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name


class ImageServicer(image_pb2_grpc.ImageServiceServicer):
    """ImageService."""

    def __init__(self, pipeline: DrawingPipeline) -> None:
        self._pipeline = pipeline

    async def Generate(  # type: ignore[override]
        self, request: image_pb2.ImageServiceGenerateRequest, context: Any
    ) -> None:
        await self._pipeline.run(request, context, context.write)


def service(path: RequestPath) -> Service:
    """The router's service for clients."""
    return Service(NAME, image_pb2_grpc.add_ImageServiceServicer_to_server, ImageServicer(DrawingPipeline(path)))
