"""Pictures end to end, on real weights: what is drawn is read back, and another worker draws the same bytes."""

import sys

import pytest
from support.cluster.in_process import PATIENT, Bench, bench
from support.engines.checkpoints import DEMO

from baton import AsyncClient
from baton.images import user_message
from services.config import WorkerConfig
from services.engines.diffusers.config import DiffusionConfig
from services.engines.pytorch.config import PyTorchConfig

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="diffusers needs Python 3.11")

PROMPT = "a red circle and a blue square"


def painter(worker_id: str) -> WorkerConfig:
    engine = DiffusionConfig(model=DEMO.parent / "demo_diffusion", device="cpu", threads=1, guidance_scale=5.0)
    return WorkerConfig(worker_id=worker_id, roles=("diffuse",), engine=engine, drain_seconds=0)


def reader() -> WorkerConfig:
    engine = PyTorchConfig(model=DEMO, device="cpu", threads=1, kv_cache_bytes=16 << 20)
    return WorkerConfig(worker_id="w1", roles=("encode", "prefill", "decode"), engine=engine, drain_seconds=0)


async def drawn(running: Bench, *, seed: int, steps: int) -> bytes:
    async with AsyncClient(running.address) as client:
        events = [event async for event in client.draw(PROMPT, seed=seed, steps=steps, timeout_seconds=120)]
    return events[-2].image.data


@pytest.mark.feature("pictures from text", engine="diffusers", facade="grpc")
async def test_the_demonstration_model_sees_what_was_drawn() -> None:
    async with bench(painter("f1"), reader(), router=PATIENT) as running:
        png = await drawn(running, seed=1, steps=20)
        message = user_message("What is in the picture?", [png])
        seen = await running.text_of(chat={"messages": [message]}, model="demo")
    assert seen == PROMPT


async def test_another_worker_goes_on_with_a_lost_ones_picture_and_its_bytes_are_the_same() -> None:
    async with bench(painter("f1"), painter("f2"), router=PATIENT) as running:
        expected = await drawn(running, seed=2, steps=8)
        lost = False
        async with AsyncClient(running.address) as client:
            async for event in client.draw(PROMPT, seed=2, steps=8, timeout_seconds=120):
                if event.progress.step == 2 and not lost:
                    busy = [name for name, worker in running.workers.items() if worker.engines.load().running]
                    await running.proxies[busy[0]].cut()
                    lost = True
                if event.HasField("image"):
                    png = event.image.data
    assert lost
    assert png == expected
