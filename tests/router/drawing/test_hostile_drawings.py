"""Hostile requests for pictures, to a router and directly to a worker; very large pictures."""

import asyncio
import io
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio
from PIL import Image
from support.clients.openai_api import openai_bench, post
from support.cluster.in_process import Bench, bench, simulated
from support.eventually import eventually

from baton import AsyncClient
from baton.engine.v1 import diffuse_pb2, diffuse_pb2_grpc
from baton.errors import BatonError
from baton.inference.v1 import image_pb2, video_pb2
from rpc.channels import open_channel
from services.engines.simulated import diffuser

F1 = simulated("f1", "diffuse")


async def refused(running: Bench, **fields: Any) -> grpc.StatusCode:
    """The status of a call to the worker itself, which then serves the next one."""
    stub = running.cluster.workers[0].stub(diffuse_pb2_grpc.DiffuseServiceStub)
    request = diffuse_pb2.DiffuseRequest(**{"request_id": "r", "model": "demo", **fields})
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in stub.Diffuse(request, timeout=60):
            pass
    assert running.workers["f1"].engines.healthy
    return caught.value.code()


@pytest.mark.parametrize(
    "fields",
    [
        {"seeds": []},
        {"seeds": [1] * 1000},
        {"seeds": [1], "options": image_pb2.ImageOptions(guidance_scale=float("nan"))},
        {"seeds": [1], "options": image_pb2.ImageOptions(guidance_scale=float("inf"))},
        {"seeds": [1], "options": image_pb2.ImageOptions(width=2**32 - 1, height=2**32 - 1)},
        {"seeds": [1], "options": image_pb2.ImageOptions(steps=2**32 - 1)},
        {"seeds": [1], "video": video_pb2.VideoOptions(frames=2**32 - 1)},
        {"seeds": [1], "video": video_pb2.VideoOptions(frames_per_second=float("nan"))},
        {"seeds": [1], "video": video_pb2.VideoOptions(frames_per_second=-1.0)},
        {"seeds": [1], "video": video_pb2.VideoOptions(format=77)},
    ],
    ids=str,
)
async def test_a_worker_refuses_what_no_router_sends(fields: dict[str, Any]) -> None:
    async with bench(F1) as running:
        assert await refused(running, **fields) == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_picture_of_many_megabytes_arrives_whole_and_a_small_one_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diffuser, "_RULES", replace(diffuser._RULES, max_pixels=2**21))
    async with bench(F1) as running, AsyncClient(running.address) as client:
        for width, height in ((2048, 1024), (32, 32)):
            events = [event async for event in client.draw("x", width=width, height=height, steps=2, preview_steps=1)]
            [picture] = [event.image for event in events if event.HasField("image")]
            assert Image.open(io.BytesIO(picture.data)).size == (width, height)
            assert len(picture.data) > width * height


async def test_unknown_fields_are_ignored_by_grpc_and_named_by_http() -> None:
    options = image_pb2.ImageOptions(prompt="x", steps=2)
    known = image_pb2.ImageServiceGenerateRequest(options=options).SerializeToString()
    async with openai_bench(F1) as running, open_channel(running.address) as channel:
        call = channel.unary_stream(
            "/baton.inference.v1.ImageService/Generate",
            response_deserializer=image_pb2.ImageServiceGenerateResponse.FromString,
        )
        responses = [response async for response in call(known + b"\xfa\x7f\x03abc", timeout=60)]
        assert responses[-1].HasField("finished")
        answer = await post(running, "/images/generations", {"prompt": "x", "style": "vivid"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "style")


async def test_one_request_id_is_not_drawn_twice_at_once() -> None:
    slow = simulated("f1", "diffuse", draw_step_seconds=0.05)
    async with bench(slow) as running, AsyncClient(running.address) as client:

        async def draw() -> image_pb2.ImageServiceGenerateResponse:
            return [event async for event in client.draw("x", steps=20, request_id="same")][-1]

        first = asyncio.ensure_future(draw())
        await eventually(lambda: running.workers["f1"].engines.load().running == 1)
        with pytest.raises(BatonError) as caught:
            await draw()
        assert (await first).finished.request_id == "same"
    assert caught.value.reason == "REQUEST_EXISTS"
