"""The diffuse role: draws the pictures or clips of a call, and streams their steps."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Any

from baton.engine.v1 import diffuse_pb2, diffuse_pb2_grpc
from baton.errors import DeadlineUnreachable
from baton.inference.v1 import image_pb2, model_pb2, video_pb2
from engine_protocol.request_rules import check_clip, check_options
from rpc.interceptors.calls import arrived_at
from rpc.metadata import remaining_seconds
from rpc.server import Service
from rpc.violations import Violations
from runtime.aio import gather_or_cancel
from runtime.clock import perf_counter
from services.engines.diffusion import Clip, ClipOptions, Diffuser, Drawing, Picture, Step
from services.engines.rules import ClipRules, DrawingRules
from services.parts import WorkerParts
from services.requests.calls import Calls
from services.telemetry import metrics
from services.telemetry.timings import duration

SERVICE_NAME = diffuse_pb2.DESCRIPTOR.services_by_name["DiffuseService"].full_name

_RETRY_SECONDS = 1.0


class DiffuseServicer(diffuse_pb2_grpc.DiffuseServiceServicer):
    """DiffuseService. Only a worker without the role has no `diffuser`."""

    def __init__(self, calls: Calls, diffuser: Diffuser | None) -> None:
        self._calls = calls
        self._diffuser = diffuser

    # Writes instead of yielding: a call that is stopped while it writes is then stopped within `run`.
    async def Diffuse(self, request: diffuse_pb2.DiffuseRequest, context: Any) -> None:  # type: ignore[override]
        with self._calls.run("diffuse", request.request_id, request.model, context.invocation_metadata()) as call:
            assert self._diffuser is not None
            await call.faults.inject("queue")
            await call.faults.inject("diffuse")
            drawings = _drawings(request, self._diffuser, remaining_seconds(context))
            # One writer at a time: grpcio's streams have no order of their own.
            writing = asyncio.Lock()
            await gather_or_cancel(
                _draw(self._diffuser, index, drawing, writing, context) for index, drawing in enumerate(drawings)
            )
            metrics.COMPUTE_SECONDS.labels("diffuse").observe(perf_counter() - arrived_at())


@asynccontextmanager
async def open_service(parts: WorkerParts) -> AsyncIterator[Service]:
    """Opens the role on a worker; one without it answers RoleMismatch."""
    servicer = DiffuseServicer(parts.calls, parts.worker.engines.part("diffuser"))
    yield Service(SERVICE_NAME, diffuse_pb2_grpc.add_DiffuseServiceServicer_to_server, servicer)


def _drawings(request: diffuse_pb2.DiffuseRequest, diffuser: Diffuser, seconds: float | None) -> list[Drawing]:
    """Raises InvalidRequest naming every wrong field, and DeadlineUnreachable if there is too little time."""
    rules, options = diffuser.facts.drawing, request.options
    assert rules is not None
    _check(request, rules)
    clip = _clip(request.video, rules.clips) if request.HasField("video") and rules.clips else None
    drawings = [
        Drawing(
            prompt=options.prompt,
            negative_prompt=options.negative_prompt,
            guidance_scale=options.guidance_scale if options.HasField("guidance_scale") else rules.guidance_scale,
            width=options.width or rules.width,
            height=options.height or rules.height,
            steps=options.steps or rules.steps,
            seed=seed,
            preview_steps=options.preview_steps,
            clip=clip,
        )
        for seed in request.seeds
    ]
    predicted = diffuser.predicted_seconds(drawings)
    if predicted is not None and seconds is not None and predicted > seconds:
        text = f"drawing would take {predicted:.1f} s, and {seconds:.1f} s are left"
        raise DeadlineUnreachable(text, retry_after_seconds=_RETRY_SECONDS)
    return drawings


def _check(request: diffuse_pb2.DiffuseRequest, rules: DrawingRules) -> None:
    """The router has checked the options by the same rules, unless this worker's are others."""
    violations, limits = Violations(), image_generation(rules)
    violations.require(bool(request.seeds), "seeds", "is empty")
    violations.count("seeds", len(request.seeds), rules.max_number)
    check_options(request.options, limits, violations)
    if request.HasField("video"):
        violations.require(rules.clips is not None, "video", "this worker's model draws no clips")
        if rules.clips is not None:
            check_clip(request.video, request.options, limits, violations)
    violations.raise_any()


def image_generation(rules: DrawingRules) -> model_pb2.ImageGeneration:
    """The rules as clients and routers have them."""
    values = asdict(rules)
    clips = values.pop("clips")
    return model_pb2.ImageGeneration(**values, video=model_pb2.VideoGeneration(**clips) if clips else None)


def _clip(video: video_pb2.VideoOptions, rules: ClipRules) -> ClipOptions:
    return ClipOptions(
        frames=video.frames or rules.frames,
        frames_per_second=video.frames_per_second or rules.frames_per_second,
        is_mp4=video.format == video_pb2.VIDEO_FORMAT_MP4,
    )


async def _draw(diffuser: Diffuser, index: int, drawing: Drawing, writing: asyncio.Lock, context: Any) -> None:
    async with aclosing(diffuser.draw(drawing)) as events:
        async for event in events:
            for response in _responses(index, drawing, event):
                async with writing:
                    await context.write(response)


def _responses(index: int, drawing: Drawing, event: Step | Picture | Clip) -> Iterator[diffuse_pb2.DiffuseResponse]:
    match event:
        case Step(number, steps, remaining_seconds, preview):
            progress = image_pb2.ImageProgress(index=index, step=number, steps=steps, preview=preview)
            if remaining_seconds is not None:
                progress.remaining.CopyFrom(duration(remaining_seconds))
            yield diffuse_pb2.DiffuseResponse(progress=progress)
        case Picture(png, width, height):
            image = image_pb2.GeneratedImage(
                index=index, mime_type="image/png", data=png, width=width, height=height, seed=drawing.seed
            )
            yield diffuse_pb2.DiffuseResponse(image=image)
        case Clip(mp4, frames, width, height):
            for number, frame in enumerate(frames):
                made = video_pb2.VideoFrame(index=index, number=number, data=frame)
                yield diffuse_pb2.DiffuseResponse(frame=made)
            assert drawing.clip is not None
            video = video_pb2.GeneratedVideo(
                index=index,
                mime_type="video/mp4" if mp4 else "image/png",
                data=mp4,
                width=width,
                height=height,
                frames=drawing.frames,
                frames_per_second=drawing.clip.frames_per_second,
                seed=drawing.seed,
            )
            yield diffuse_pb2.DiffuseResponse(video=video)
