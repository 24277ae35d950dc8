"""ImageService through a router: progress, pictures, limits, failover, cancellation."""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from PIL import Image
from support.clients.scraping import since
from support.cluster.in_process import DECODE, FAST_ROUTER, Bench, bench, simulated
from support.eventually import eventually

from baton.calls import stream, unary
from baton.engine.v1 import diffuse_pb2, diffuse_pb2_grpc
from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, image_pb2, image_pb2_grpc, model_pb2, timing_pb2
from router.config import AdmissionConfig, QuotaConfig, QuotasConfig
from rpc.channels import open_channel
from services.config import WorkerConfig

PROMPT = "a red circle"


def diffuser(worker_id: str, **engine: object) -> WorkerConfig:
    return simulated(worker_id, "diffuse", **engine)


F1, F2 = diffuser("f1"), diffuser("f2")


@asynccontextmanager
async def calling(running: Bench, timeout: float = 30, **fields: Any) -> AsyncIterator[AsyncIterator[Any]]:
    """A running call, whose failure is a BatonError."""
    request = {name: fields.pop(name) for name in ("request_id", "model") if name in fields}
    options = image_pb2.ImageOptions(**{"prompt": PROMPT, **fields})
    async with open_channel(running.address) as channel:
        stub = image_pb2_grpc.ImageServiceStub(channel)
        call = stub.Generate(image_pb2.ImageServiceGenerateRequest(options=options, **request), timeout=timeout)
        async with aclosing(stream(call)) as responses:
            yield responses


async def draw(running: Bench, **fields: Any) -> Sequence[image_pb2.ImageServiceGenerateResponse]:
    async with calling(running, **fields) as responses:
        return [response async for response in responses]


def images(responses: Sequence[image_pb2.ImageServiceGenerateResponse]) -> list[image_pb2.GeneratedImage]:
    found = [response.image for response in responses if response.HasField("image")]
    return sorted(found, key=lambda image: image.index)


def violations(error: BatonError) -> list[str]:
    return [one.field for one in getattr(error, "violations", ())]


@pytest.mark.feature("pictures from text", engine="simulated", facade="grpc")
async def test_a_picture_comes_after_each_of_its_steps_and_the_end_says_where_the_time_went() -> None:
    async with bench(F1) as running:
        responses = await draw(running, steps=5, width=32, height=48, preview_steps=2)
    progress = [response.progress for response in responses[:-2]]
    assert [(one.step, one.steps) for one in progress] == [(number, 5) for number in range(1, 6)]
    assert [bool(one.preview) for one in progress] == [False, True, False, True, False]
    [image] = images(responses)
    assert Image.open(io.BytesIO(image.data)).size == (image.width, image.height) == (32, 48)
    finished = responses[-1].finished
    assert finished.model == "demo"
    assert finished.request_id
    assert timing_pb2.STAGE_DIFFUSE in [timing.stage for timing in finished.timings]


async def test_the_same_seed_gives_the_same_picture_and_each_picture_has_a_seed_of_its_own() -> None:
    async with bench(F1, F2) as running:
        three = images(await draw(running, seed=7, number=3))
        alone = images(await draw(running, seed=8))
        chosen = [images(await draw(running))[0].seed for _ in range(2)]
    assert [image.seed for image in three] == [7, 8, 9]
    assert len({image.data for image in three}) == 3
    assert alone[0].data == three[1].data
    assert len(set(chosen)) == 2


async def test_wrong_fields_are_all_named_before_a_worker_is_called() -> None:
    async with bench(F1) as running:
        with pytest.raises(BatonError) as caught:
            await draw(running, prompt="", width=17, steps=0, number=5, guidance_scale=-1.0)
        with pytest.raises(BatonError) as too_large:
            await draw(running, width=1024, height=2048)
        with pytest.raises(BatonError) as too_long:
            await draw(running, prompt="x" * 2001)
    wrong = ["guidance_scale", "number", "prompt", "steps", "width"]
    assert sorted(violations(caught.value)) == [f"options.{name}" for name in wrong]
    assert violations(too_large.value) == ["options.height"]
    assert violations(too_long.value) == ["options.prompt"]
    assert (caught.value.worker_id, too_large.value.worker_id) == ("", "")


@pytest.mark.feature("recovery from a lost diffuse worker", engine="simulated", facade="grpc")
async def test_a_lost_worker_is_replaced_and_the_pictures_are_the_same() -> None:
    slow = [diffuser(name, draw_step_seconds=0.05) for name in ("f1", "f2")]
    async with bench(*slow) as running:
        responses: list[image_pb2.ImageServiceGenerateResponse] = []
        async with calling(running, seed=3, number=2, steps=10) as events:
            async for event in events:
                responses.append(event)
                if len(images(responses)) == 1 and running.proxies:
                    busy = [name for name, worker in running.workers.items() if worker.engines.load().running]
                    await running.proxies[busy[0]].cut()
                    running.proxies.clear()
        expected = images(await draw(running, seed=3, number=2, steps=10))
    found = images(responses)
    assert [image.index for image in found] == [0, 1]
    assert [image.data for image in found] == [image.data for image in expected]


async def test_a_cancel_and_a_client_that_leaves_stop_the_worker() -> None:
    async with bench(diffuser("f1", draw_step_seconds=0.05)) as running:
        load = running.workers["f1"].engines.load
        asked = asyncio.ensure_future(draw(running, request_id="mine", steps=200))
        await eventually(lambda: load().running == 1)
        cancelling = generate_pb2.CancelGenerationRequest(request_id="mine")
        answer = await running.stub.CancelGeneration(cancelling, timeout=60)
        with pytest.raises(BatonError) as cancelled:
            await asked
        await eventually(lambda: load().running == 0)
        async with calling(running, steps=200) as events:
            await anext(events)
        await eventually(lambda: load().running == 0)
        assert running.workers["f1"].engines.part("diffuser").steps < 200
    assert cancelled.value.reason == "CANCELLED"
    assert [receipt.worker_id for receipt in answer.receipts] == ["f1"]


async def test_a_picture_that_would_take_too_long_is_refused_at_once() -> None:
    async with bench(diffuser("f1", draw_step_seconds=1.0)) as running:
        with pytest.raises(BatonError, match="would take 100") as caught:
            await draw(running, steps=100, timeout=10)
        assert running.workers["f1"].engines.part("diffuser").steps == 0
    assert caught.value.reason == "DEADLINE_UNREACHABLE"


async def test_pictures_need_a_model_that_draws_and_text_one_that_writes() -> None:
    async with bench(DECODE) as running:
        with pytest.raises(BatonError) as no_worker:
            await draw(running)
        with pytest.raises(BatonError, match="pictures") as unsupported:
            await draw(running, model="demo")
    assert (no_worker.value.reason, unsupported.value.reason) == ("NO_WORKER", "UNSUPPORTED")


async def test_a_model_without_a_name_is_the_one_that_can_do_what_is_asked() -> None:
    painter = simulated("f1", "diffuse").model_copy(
        update={"engine": simulated("f1", "diffuse").engine.model_copy(update={"name": "painter"})}
    )
    async with bench(painter, DECODE) as running:
        responses = await draw(running)
        models = await unary(running.stub.ListModels(model_pb2.ListModelsRequest(), timeout=60))
    assert responses[-1].finished.model == "painter"
    drawing = {model.name: model.image_generation.steps for model in models.models}
    assert drawing == {"demo": 0, "painter": 8}


async def test_quotas_and_places_count_requests_for_pictures() -> None:
    quotas = QuotasConfig(default=QuotaConfig(requests_per_second=0.001, burst_seconds=1000))
    admission = AdmissionConfig(max_running_per_worker=1)
    router = FAST_ROUTER.model_copy(update={"quotas": quotas, "admission": admission})
    async with bench(F1, router=router) as running:
        await draw(running)
        with pytest.raises(BatonError) as caught:
            await draw(running)
    assert caught.value.reason == "QUOTA_EXCEEDED"


async def test_a_request_is_counted_as_others_are() -> None:
    requests = since("baton_router_requests_total", model="demo", request_class="diffuse", outcome="ok", reason="OK")
    calls = since("baton_worker_calls_total", stage="diffuse", outcome="ok", reason="OK")
    async with bench(F1) as running:
        await draw(running)
    assert (requests.grown, calls.grown) == (1, 1)


async def test_a_worker_without_the_role_says_so() -> None:
    async with bench(DECODE) as running:
        stub = running.cluster.workers[0].stub(diffuse_pb2_grpc.DiffuseServiceStub)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Diffuse(diffuse_pb2.DiffuseRequest(request_id="r"), timeout=60).read()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
