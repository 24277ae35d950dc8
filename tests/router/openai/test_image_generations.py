"""`/v1/images/generations` by the official client: its pictures are those of ImageService by gRPC."""

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from support.clients.openai_api import client_of, openai_bench, post
from support.cluster.in_process import Bench, simulated
from support.eventually import eventually
from support.lifetimes import in_one_task

from baton import AsyncClient
from services.engines.simulated import diffuser


@pytest.fixture
async def served() -> AsyncIterator[Bench]:
    async with in_one_task(openai_bench(simulated("f1", "diffuse", draw_step_seconds=0.01))) as running:
        yield running


async def by_grpc(running: Bench, **options: Any) -> list[bytes]:
    async with AsyncClient(running.address) as client:
        events = [event async for event in client.draw("a red circle", **options)]
    images = sorted((event.image for event in events if event.HasField("image")), key=lambda image: image.index)
    return [image.data for image in images]


@pytest.mark.feature("pictures from text", engine="simulated", facade="openai")
async def test_the_pictures_are_those_of_the_same_seed_by_grpc(served: Bench) -> None:
    own: Any = {"seed": 5, "steps": 4}
    answer = await client_of(served).images.generate(
        model="demo", prompt="a red circle", n=2, size="32x48", extra_body=own
    )
    expected = await by_grpc(served, seed=5, steps=4, number=2, width=32, height=48)
    assert [base64.b64decode(one.b64_json or "") for one in answer.data or ()] == expected


async def test_pictures_are_data_urls_if_urls_are_asked_for(served: Bench) -> None:
    own: Any = {"seed": 5, "steps": 4}
    answer = await client_of(served).images.generate(
        model="demo", prompt="a red circle", n=2, response_format="url", extra_body=own
    )
    expected = await by_grpc(served, seed=5, steps=4, number=2)
    urls = [one.url or "" for one in answer.data or ()]
    assert urls == ["data:image/png;base64," + base64.b64encode(png).decode() for png in expected]


async def test_a_stream_has_partial_images_and_then_the_picture(served: Bench) -> None:
    own: Any = {"seed": 5}
    stream = await client_of(served).images.generate(
        model="demo", prompt="a red circle", stream=True, partial_images=3, extra_body=own
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:3]] == [0, 1, 2]  # type: ignore[union-attr]
    assert [base64.b64decode(events[-1].b64_json)] == await by_grpc(served, seed=5)


async def test_wrong_fields_are_named_in_openais_words(served: Bench) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "size": {"size": "17x16"},
        "n": {"n": 5},
        "prompt": {"prompt": ""},
        "steps": {"steps": 1001},
        "response_format": {"response_format": "url", "stream": True},
        "output_format": {"output_format": "webp"},
        "style": {"style": "vivid"},
    }
    for field, body in wrong.items():
        answer = await post(served, "/images/generations", {"prompt": "a red circle", **body})
        assert (answer.status_code, json.loads(answer.content)["error"]["param"]) == (400, field), field
    with pytest.raises(openai.NotFoundError):
        await client_of(served).images.generate(model="other", prompt="x")


async def test_a_client_that_leaves_stops_the_worker() -> None:
    async with openai_bench(simulated("f1", "diffuse", draw_step_seconds=0.05)) as running:
        load = running.workers["f1"].engines.load
        stream = await client_of(running).images.generate(
            prompt="x", stream=True, partial_images=3, extra_body={"steps": 60}
        )
        assert load().running == 1
        await stream.close()
        await eventually(lambda: load().running == 0)


async def test_what_a_model_cannot_draw_is_named_in_openais_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffuser, "_RULES", replace(diffuser._RULES, negative_prompt=False, previews=False))
    wrong: dict[str, dict[str, Any]] = {
        "negative_prompt": {"negative_prompt": "blue"},
        "partial_images": {"stream": True, "partial_images": 1},
    }
    async with openai_bench(simulated("f1", "diffuse")) as running:
        for param, fields in wrong.items():
            response = await post(running, "/images/generations", {"prompt": "a red circle", **fields})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert f"does not support {param};" in error["message"]
