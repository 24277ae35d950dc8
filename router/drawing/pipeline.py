"""The life of a request for pictures or clips, top to bottom: validate, admit, draw."""

from collections.abc import Awaitable, Callable
from functools import partial

from baton.engine.v1 import diffuse_pb2
from baton.errors import SlowReader
from baton.inference.v1 import generate_pb2, image_pb2, timing_pb2, video_pb2
from router.admission.predictor import RequestEstimate
from router.context import RequestContext
from router.drawing import options
from router.drawing.calls import ROLE, DiffuseCall, Event
from router.drawing.options import DrawingModel, Request
from router.request_path import RequestPath
from router.telemetry.spans import set_drawing_attributes
from router.workers.role_calls import call_with_retries
from runtime.aio import timeout

Finished = image_pb2.ImagesFinished
Send = Callable[[Event | Finished], Awaitable[None]]


class DrawingPipeline:
    """Runs requests for pictures and clips on a router's parts."""

    def __init__(self, path: RequestPath) -> None:
        self._path = path

    async def run(self, request: Request, call: object, send: Send) -> None:
        """Answers a call, event by event. Raises a BatonError if it fails. A cancellation of the caller means that the
        client has left.
        """
        send = partial(_send_in_time, send, self._path.pipeline.limits.slow_reader_seconds)
        same = generate_pb2.GenerateRequest(request_id=request.request_id, model=request.model)
        ctx = self._path.contexts.create(same, call)
        ctx.stats.operation = ROLE
        describe = partial(set_drawing_attributes, request)
        await self._path.running.run(ctx, "baton.image", describe, partial(self._answer, ctx, request, send))
        stages = ctx.stats.timings.message().stages
        await send(Finished(request_id=ctx.request_id, model=ctx.stats.model, timings=stages))

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
            if request.output_uri:
                await self._path.store.check(request.output_uri, "output_uri")
        return target

    async def _draw(self, ctx: RequestContext, request: Request, target: DrawingModel, send: Send) -> None:
        path = self._path
        path.retries.earn()
        asked = diffuse_pb2.DiffuseRequest(
            request_id=ctx.call_id,
            model=target.model.name,
            options=request.options,
            seeds=options.seeds(request.options),
            video=request.video if isinstance(request, video_pb2.VideoServiceGenerateRequest) else None,
        )
        asked.options.ClearField("seed")
        asked.options.ClearField("number")
        if asked.HasField("video") and not asked.video.HasField("frames"):
            asked.video.frames = target.rules.video.frames
        with ctx.stats.timings.measure(timing_pb2.STAGE_DIFFUSE):
            if request.output_uri:
                send = partial(self._store, request.output_uri, ctx.call_id, send)
            await call_with_retries(ctx, path.retries, DiffuseCall(path.workers, ctx, asked, send))

    async def _store(self, folder: str, call_id: str, send: Send, event: Event | Finished) -> None:
        """Sends an event, its file by address. The call's id makes the name unique."""
        match event:
            case image_pb2.GeneratedImage():
                name = f"{call_id}-{event.index}.png"
            case video_pb2.VideoFrame():
                name = f"{call_id}-{event.index}-{event.number}.png"
            case video_pb2.GeneratedVideo() if event.data:
                name = f"{call_id}-{event.index}.mp4"
            case _:
                await send(event)
                return
        event.uri = await self._path.store.write(folder, "output_uri", name, event.data)
        event.ClearField("data")
        await send(event)


async def _send_in_time(send: Send, seconds: float, event: Event | Finished) -> None:
    """Raises SlowReader if the client takes too long to read what came before."""
    try:
        async with timeout(seconds):
            await send(event)
    except TimeoutError:
        raise SlowReader(f"the client has read nothing for {seconds:g} s") from None
