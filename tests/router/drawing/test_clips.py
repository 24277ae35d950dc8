"""VideoService through a router: frames, limits, failover, cancellation."""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from support.clients.scraping import since
from support.cluster.in_process import Bench, bench, simulated
from support.eventually import eventually

from baton.calls import stream
from baton.engine.v1 import diffuse_pb2, diffuse_pb2_grpc
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, image_pb2, image_pb2_grpc, video_pb2, video_pb2_grpc
from rpc.channels import open_channel
from services.config import WorkerConfig
from services.engines.simulated import diffuser as simulated_diffuser

Response = video_pb2.VideoServiceGenerateResponse


def diffuser(worker_id: str, **engine: object) -> WorkerConfig:
    return simulated(worker_id, "diffuse", **engine)


@asynccontextmanager
async def calling(running: Bench, *, request_id: str = "", **fields: Any) -> AsyncIterator[AsyncIterator[Response]]:
    """A running call, whose failure is a BatonError. `video` are the fields of VideoOptions, others of ImageOptions."""
    video = video_pb2.VideoOptions(**fields.pop("video", {}))
    options = image_pb2.ImageOptions(**{"prompt": "a red circle moves left", **fields})
    request = video_pb2.VideoServiceGenerateRequest(request_id=request_id, options=options, video=video)
    async with open_channel(running.address) as channel:
        call = video_pb2_grpc.VideoServiceStub(channel).Generate(request, timeout=30)
        async with aclosing(stream(call)) as responses:
            yield responses


async def draw(running: Bench, **fields: Any) -> list[Response]:
    async with calling(running, **fields) as responses:
        return [response async for response in responses]


def frames(responses: Sequence[Response], index: int = 0) -> list[bytes]:
    found = [response.frame for response in responses if response.HasField("frame") and response.frame.index == index]
    assert [frame.number for frame in found] == list(range(len(found)))
    return [frame.data for frame in found]


@pytest.mark.feature("clips from text", engine="simulated", facade="grpc")
async def test_a_clip_comes_frame_by_frame_after_its_steps() -> None:
    async with bench(diffuser("f1")) as running:
        responses = await draw(running, steps=3, width=32, height=48, video={"frames": 5, "frames_per_second": 12.5})
        by_default = await draw(running)
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["progress"] * 3 + ["frame"] * 5 + ["video", "finished"]
    sizes = {Image.open(io.BytesIO(frame)).size for frame in frames(responses)}
    clip = responses[-2].video
    assert sizes == {(32, 48)} == {(clip.width, clip.height)}
    assert (clip.frames, clip.frames_per_second, clip.mime_type, clip.data) == (5, 12.5, "image/png", b"")
    assert len(set(frames(responses))) == 5
    assert len(frames(by_default)) == 4
    assert responses[-1].finished.model == "demo"


async def test_each_clip_has_a_seed_of_its_own_and_the_rate_changes_no_frame() -> None:
    async with bench(diffuser("f1")) as running:
        two = await draw(running, seed=7, number=2)
        alone = await draw(running, seed=8, video={"frames_per_second": 30})
    assert [response.video.seed for response in two if response.HasField("video")] == [7, 8]
    assert frames(alone) == frames(two, 1) != frames(two, 0)


async def test_wrong_fields_are_all_named_before_a_worker_is_called() -> None:
    wrong = {
        "video.frames": [{"frames": 0}, {"frames": 65}],
        "video.frames_per_second": [{"frames_per_second": 0}, {"frames_per_second": float("nan")}],
        "video.format": [{"format": 9}, {"format": video_pb2.VIDEO_FORMAT_MP4}],
    }
    async with bench(diffuser("f1")) as running:
        for field, options in wrong.items():
            for video in options:
                with pytest.raises(BatonError) as caught:
                    await draw(running, steps=0, video=video)
                assert [one.field for one in getattr(caught.value, "violations", ())] == [field, "options.steps"]
                assert caught.value.worker_id == ""


async def test_a_number_of_frames_that_the_model_cannot_draw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = simulated_diffuser._RULES
    assert rules.clips is not None
    only_some = replace(rules, clips=replace(rules.clips, frames=5, frame_multiple=4))
    monkeypatch.setattr(simulated_diffuser, "_RULES", only_some)
    async with bench(diffuser("f1")) as running:
        with pytest.raises(BatonError, match="1 more than a multiple of 4, is 8"):
            await draw(running, video={"frames": 8})
        assert len(frames(await draw(running, video={"frames": 9}))) == 9


async def test_a_model_without_clips_refuses_them_and_draws_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_diffuser, "_RULES", replace(simulated_diffuser._RULES, clips=None))
    async with bench(diffuser("f1")) as running:
        with pytest.raises(BatonError, match="clips") as caught:
            await draw(running)
        async with open_channel(running.address) as channel:
            asked = image_pb2.ImageServiceGenerateRequest(options=image_pb2.ImageOptions(prompt="x"))
            stub = image_pb2_grpc.ImageServiceStub(channel)
            pictures = [response async for response in stream(stub.Generate(asked, timeout=30))]
    assert caught.value.reason == "UNSUPPORTED"
    assert pictures[-2].HasField("image")


@pytest.mark.feature("recovery from a lost diffuse worker", engine="simulated", facade="grpc")
async def test_a_worker_lost_between_frames_is_replaced_and_they_come_again_the_same() -> None:
    slow = [diffuser(name, draw_step_seconds=0.05) for name in ("f1", "f2")]
    async with bench(*slow) as running:
        expected = frames(await draw(running, seed=3, steps=6))
        responses: list[Response] = []
        async with calling(running, seed=3, steps=6) as events:
            async for event in events:
                responses.append(event)
                if event.progress.step == 3 and running.proxies:
                    busy = [name for name, worker in running.workers.items() if worker.engines.load().running]
                    await running.proxies[busy[0]].cut()
                    running.proxies.clear()
    assert [response.progress.step for response in responses if response.HasField("progress")][:4] == [1, 2, 3, 1]
    assert frames(responses) == expected


async def test_a_cancel_and_a_client_that_leaves_stop_the_worker() -> None:
    async with bench(diffuser("f1", draw_step_seconds=0.05)) as running:
        worker = running.workers["f1"]
        asked = asyncio.ensure_future(draw(running, request_id="mine", steps=200))
        await eventually(lambda: worker.engines.load().running == 1)
        await running.stub.CancelGeneration(generate_pb2.CancelGenerationRequest(request_id="mine"), timeout=60)
        with pytest.raises(BatonError) as cancelled:
            await asked
        await eventually(lambda: worker.engines.load().running == 0)
        async with calling(running, steps=200) as events:
            await anext(events)
        await eventually(lambda: worker.engines.load().running == 0)
        assert worker.engines.part("diffuser").steps < 200
    assert cancelled.value.reason == "CANCELLED"


async def test_a_clip_is_counted_as_a_picture_is() -> None:
    requests = since("baton_router_requests_total", model="demo", request_class="diffuse", outcome="ok", reason="OK")
    async with bench(diffuser("f1")) as running:
        await draw(running)
    assert requests.grown == 1


async def test_a_worker_checks_the_clip_itself() -> None:
    async with bench(diffuser("f1")) as running:
        request = diffuse_pb2.DiffuseRequest(
            request_id="r",
            model="demo",
            options=image_pb2.ImageOptions(prompt="x"),
            seeds=[1],
            video=video_pb2.VideoOptions(frames=65, format=video_pb2.VIDEO_FORMAT_MP4),
        )
        async with open_channel(running.workers["f1"].address) as channel:
            call = diffuse_pb2_grpc.DiffuseServiceStub(channel).Diffuse(request, timeout=30)
            with pytest.raises(BatonError) as caught:
                [_ async for _ in stream(call)]
    assert [one.field for one in getattr(caught.value, "violations", ())] == ["video.frames", "video.format"]
