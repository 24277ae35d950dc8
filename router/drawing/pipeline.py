"""The life of a request for pictures, top to bottom: validate, admit, draw. ImageService, which clients call."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from baton.engine.v1 import diffuse_pb2
from baton.inference.v1 import generate_pb2, image_pb2, image_pb2_grpc, timing_pb2
from router.admission.predictor import RequestEstimate
from router.context import RequestContext
from router.drawing import options
from router.drawing.calls import ROLE, DiffuseCall, Event
from router.drawing.options import DrawingModel
from router.request_path import RequestPath
from router.telemetry.spans import set_image_attributes
from router.workers.role_calls import call_with_retries
from rpc.server import Service

Request = image_pb2.ImageServiceGenerateRequest
Response = image_pb2.ImageServiceGenerateResponse
Send = Callable[[Response], Awaitable[None]]


class DrawingPipeline:
    """Runs requests for pictures on a router's parts."""

    def __init__(self, path: RequestPath) -> None:
        self._path = path

    async def run(self, request: Request, call: object, send: Send) -> None:
        """Answers a call, event by event. Raises a BatonError if it fails. A cancellation of the caller means that the
        client has left.
        """
        same = generate_pb2.GenerateRequest(request_id=request.request_id, model=request.model)
        ctx = self._path.contexts.create(same, call)
        ctx.stats.operation = ROLE
        describe = partial(set_image_attributes, request.options)
        await self._path.running.run(ctx, "baton.image", describe, partial(self._answer, ctx, request, send))
        stages = ctx.stats.timings.message().stages
        finished = image_pb2.ImagesFinished(request_id=ctx.request_id, model=ctx.stats.model, timings=stages)
        await send(Response(finished=finished))

    async def _answer(self, ctx: RequestContext, request: Request, send: Send) -> None:
        """Draws, within the tenant's quota."""
        admission = self._path.admission
        async with admission.track_tenant(ctx):
            target = await self._validate(ctx, request)
            async with admission.admit(ctx, RequestEstimate(target.model.name, 0, None, ROLE)):
                await self._draw(ctx, request, target, send)

    async def _validate(self, ctx: RequestContext, request: Request) -> DrawingModel:
        with ctx.stats.timings.measure(timing_pb2.STAGE_ADMISSION):
            await ctx.inject("admission")
            target = options.find_model(self._path.cluster, request.model)
            ctx.stats.model = target.model.name
            options.check(request, target)
        return target

    async def _draw(self, ctx: RequestContext, request: Request, target: DrawingModel, send: Send) -> None:
        path = self._path
        path.retries.earn()
        asked = diffuse_pb2.DiffuseRequest(
            request_id=ctx.call_id,
            model=target.model.name,
            options=request.options,
            seeds=options.seeds(request.options),
        )
        asked.options.ClearField("seed")
        asked.options.ClearField("number")
        with ctx.stats.timings.measure(timing_pb2.STAGE_DIFFUSE):
            call = DiffuseCall(path.workers, ctx, asked, lambda event: send(_response(event)))
            await call_with_retries(ctx, path.retries, call)


def _response(event: Event) -> Response:
    if isinstance(event, image_pb2.GeneratedImage):
        return Response(image=event)
    return Response(progress=event)


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
