"""Test requests to idle engines: how soon a hung one is found, its recovery, and what does not count them."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from support.clients.scraping import counts
from support.clock import ManualClock
from support.engines.checkpoints import DEMO
from support.engines.device import ON_DEVICE
from support.eventually import eventually

from discovery.memory import MemoryRegistry
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.embedding.embedder import PyTorchEmbedder
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.vision.encoder import PyTorchEncoder
from services.engines.running import canary as canaries
from services.engines.running.canary import Canary
from services.server import host_worker
from services.worker import Worker


def settings(**options: object) -> PyTorchConfig:
    common = {"model": DEMO, "threads": 1, "kv_cache_bytes": 16 << 20, "stall_seconds": 600.0, **ON_DEVICE}
    return PyTorchConfig.model_validate({**common, **options})


@asynccontextmanager
async def served(roles: tuple[str, ...], **options: object) -> AsyncIterator[Worker]:
    """A worker that watches its engine, as a process does."""
    config = WorkerConfig.model_validate(
        {"roles": roles, "engine": settings(**options).model_dump(), "drain_seconds": 0}
    )
    async with host_worker(config, MemoryRegistry("test")) as worker:
        watching = asyncio.create_task(worker.watch_engines())
        yield worker
        watching.cancel()
        await asyncio.wait([watching])


def hang_engine(worker: Worker, going_on: threading.Event) -> Callable[[], bool]:
    engine = worker.engine
    assert isinstance(engine, PyTorchEngine)
    hanging = threading.Event()
    start = engine.runner.start

    def wait(chunks: object) -> object:
        hanging.set()
        going_on.wait()
        return start(chunks)  # type: ignore[arg-type]

    engine.runner.start = wait  # type: ignore[assignment]
    return hanging.is_set


def hang_module(worker: Worker, going_on: threading.Event) -> Callable[[], bool]:
    part = worker.engines.part("embedder") or (worker.engines.encoding and worker.engines.encoding.encoder)
    assert isinstance(part, PyTorchEmbedder | PyTorchEncoder)
    module = part._model.module if isinstance(part, PyTorchEmbedder) else part.module
    hanging = threading.Event()
    method = "forward" if isinstance(part, PyTorchEmbedder) else "get_image_features"
    compute = getattr(module, method)

    def wait(*arguments: object, **named: object) -> object:
        hanging.set()
        going_on.wait()
        return compute(*arguments, **named)

    setattr(module, method, wait)
    return hanging.is_set


@pytest.mark.parametrize(
    ("role", "hang"),
    [("decode", hang_engine), ("embed", hang_module), ("encode", hang_module)],
    ids=["decode", "embed", "encode"],
)
async def test_an_idle_engine_that_hangs_is_not_serving_and_serves_again_when_it_answers(
    role: str, hang: Callable[[Worker, threading.Event], Callable[[], bool]]
) -> None:
    seconds, going_on = 2.0, threading.Event()
    async with served((role,), canary_seconds=seconds, canary_patience_seconds=60.0) as worker:
        # One test has been answered.
        part = worker.engine or worker.engines.part("embedder") or worker.engines.encoding.encoder  # type: ignore[union-attr]
        await eventually(lambda: part._canary._slowest_seconds is not None)  # type: ignore[union-attr]
        hanging = hang(worker, going_on)
        try:
            await eventually(lambda: not worker.health.serving, 10 * seconds)
            assert hanging()
            assert worker.engines.healthy
            assert worker.engines.load().running == worker.engines.load().waiting == 0
        finally:
            going_on.set()
        await eventually(lambda: worker.health.serving)


async def test_a_slow_engine_is_late_only_when_it_is_far_slower_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = ManualClock(), 0
    monkeypatch.setattr(canaries, "monotonic", clock)

    async def ask() -> None:
        nonlocal asked
        asked += 1
        clock.advance(0.3)
        if asked > 5:
            await asyncio.Event().wait()

    async with Canary(ask, clock, 0.1, 60.0) as canary:
        await eventually(lambda: asked > 5)
        clock.advance(0.8)
        assert not canary.is_late
        clock.advance(0.4)
        assert canary.is_late
        assert not canary.is_overdue


async def test_before_a_test_was_answered_an_engine_has_the_whole_patience() -> None:
    began = time.monotonic()
    async with Canary(asyncio.Event().wait, lambda: time.monotonic() - began, 0.05, 1.0) as canary:  # type: ignore[arg-type]
        await eventually(lambda: canary.is_late)
        assert time.monotonic() - began > 1.0
        assert canary.is_overdue


@pytest.mark.parametrize("role", ["decode", "embed", "encode"])
async def test_no_metric_counts_the_tests_of_an_embedded_engine(role: str) -> None:
    async with served((role,), canary_seconds=0.02, canary_patience_seconds=60.0) as worker:
        part = worker.engine or worker.engines.part("embedder") or worker.engines.encoding.encoder  # type: ignore[union-attr]
        tests = 0
        ask = part._canary._ask  # type: ignore[union-attr]

        async def counted() -> None:
            nonlocal tests
            await ask()
            tests += 1

        part._canary._ask = counted  # type: ignore[union-attr]
        before = counts()
        await eventually(lambda: tests >= 10)
        assert counts() == before
