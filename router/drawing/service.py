"""ImageService and VideoService, which clients call."""

from typing import Any

from baton.inference.v1 import image_pb2, image_pb2_grpc, video_pb2, video_pb2_grpc
from router.drawing.calls import Event
from router.drawing.pipeline import DrawingPipeline, Finished
from router.request_path import RequestPath
from rpc.server import Service

_IMAGES = image_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name
_VIDEOS = video_pb2.DESCRIPTOR.services_by_name["VideoService"].full_name


class ImageServicer(image_pb2_grpc.ImageServiceServicer):
    """ImageService."""

    def __init__(self, pipeline: DrawingPipeline) -> None:
        self._pipeline = pipeline

    async def Generate(  # type: ignore[override]
        self, request: image_pb2.ImageServiceGenerateRequest, context: Any
    ) -> None:
        await self._pipeline.run(request, context, lambda event: context.write(_image_response(event)))


class VideoServicer(video_pb2_grpc.VideoServiceServicer):
    """VideoService."""

    def __init__(self, pipeline: DrawingPipeline) -> None:
        self._pipeline = pipeline

    async def Generate(  # type: ignore[override]
        self, request: video_pb2.VideoServiceGenerateRequest, context: Any
    ) -> None:
        await self._pipeline.run(request, context, lambda event: context.write(_video_response(event)))


def images(path: RequestPath) -> Service:
    """The router's service for pictures."""
    return Service(_IMAGES, image_pb2_grpc.add_ImageServiceServicer_to_server, ImageServicer(DrawingPipeline(path)))


def videos(path: RequestPath) -> Service:
    """The router's service for clips."""
    return Service(_VIDEOS, video_pb2_grpc.add_VideoServiceServicer_to_server, VideoServicer(DrawingPipeline(path)))


def _image_response(event: Event | Finished) -> image_pb2.ImageServiceGenerateResponse:
    match event:
        case image_pb2.ImageProgress():
            return image_pb2.ImageServiceGenerateResponse(progress=event)
        case image_pb2.GeneratedImage():
            return image_pb2.ImageServiceGenerateResponse(image=event)
        case image_pb2.ImagesFinished():
            return image_pb2.ImageServiceGenerateResponse(finished=event)
    raise AssertionError("clips are drawn for VideoService alone")


def _video_response(event: Event | Finished) -> video_pb2.VideoServiceGenerateResponse:
    match event:
        case image_pb2.ImageProgress():
            return video_pb2.VideoServiceGenerateResponse(progress=event)
        case video_pb2.VideoFrame():
            return video_pb2.VideoServiceGenerateResponse(frame=event)
        case video_pb2.GeneratedVideo():
            return video_pb2.VideoServiceGenerateResponse(video=event)
        case image_pb2.ImagesFinished():
            return video_pb2.VideoServiceGenerateResponse(finished=event)
    raise AssertionError("pictures are drawn for ImageService alone")
