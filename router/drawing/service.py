"""ImageService and VideoService, which clients call."""

from typing import Any

from baton.inference.v1 import image_pb2, image_pb2_grpc, video_pb2, video_pb2_grpc
from router.drawing.calls import Event
from router.drawing.pipeline import DrawingPipeline, Finished
from router.request_path import RequestPath
from rpc.server import Service

_IMAGES = image_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name
_VIDEOS = video_pb2.DESCRIPTOR.services_by_name["VideoService"].full_name
# The fields of both responses; frames and videos are drawn for VideoService alone.
_FIELDS: dict[type[Event | Finished], str] = {
    image_pb2.ImageProgress: "progress",
    image_pb2.GeneratedImage: "image",
    video_pb2.VideoFrame: "frame",
    video_pb2.GeneratedVideo: "video",
    image_pb2.ImagesFinished: "finished",
}


class ImageServicer(image_pb2_grpc.ImageServiceServicer):
    """ImageService."""

    def __init__(self, pipeline: DrawingPipeline) -> None:
        self._pipeline = pipeline

    async def Generate(  # type: ignore[override]
        self, request: image_pb2.ImageServiceGenerateRequest, context: Any
    ) -> None:
        await self._pipeline.run(
            request, context, lambda event: context.write(_response(image_pb2.ImageServiceGenerateResponse, event))
        )


class VideoServicer(video_pb2_grpc.VideoServiceServicer):
    """VideoService."""

    def __init__(self, pipeline: DrawingPipeline) -> None:
        self._pipeline = pipeline

    async def Generate(  # type: ignore[override]
        self, request: video_pb2.VideoServiceGenerateRequest, context: Any
    ) -> None:
        await self._pipeline.run(
            request, context, lambda event: context.write(_response(video_pb2.VideoServiceGenerateResponse, event))
        )


def images(path: RequestPath) -> Service:
    """The router's service for pictures."""
    return Service(_IMAGES, image_pb2_grpc.add_ImageServiceServicer_to_server, ImageServicer(DrawingPipeline(path)))


def videos(path: RequestPath) -> Service:
    """The router's service for clips."""
    return Service(_VIDEOS, video_pb2_grpc.add_VideoServiceServicer_to_server, VideoServicer(DrawingPipeline(path)))


def _response(kind: Any, event: Event | Finished) -> Any:
    return kind(**{_FIELDS[type(event)]: event})
