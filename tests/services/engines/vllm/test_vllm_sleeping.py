"""The sleep of an idle vLLM, beside a stand-in for its two calls. On a GPU: test_vllm_on_a_gpu.py."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from support.eventually import eventually

from baton.errors import Unavailable
from services.engines.external.requests import RequestLimits
from services.engines.vllm.requests.generation import VllmRequest
from services.engines.vllm.requests.inflight import VllmRequests
from services.engines.vllm.requests.sampling import Plan
from services.engines.vllm.sleeping import VllmSleep


class Core:
    """Counts sleeps; each call takes until `go_on` is set. A request lasts until `finish` is set."""

    def __init__(self) -> None:
        self.asleep = False
        self.sleeps = 0
        self.go_on, self.finish = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.error: Exception | None = None

    async def sleep(self, level: int) -> None:
        assert level == 1
        self.asleep = True
        self.sleeps += 1
        await self.go_on.wait()

    async def wake_up(self) -> None:
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        self.asleep = False

    async def generate(self, **_: Any) -> AsyncGenerator[Any, None]:
        assert not self.asleep
        await self.finish.wait()
        return
        yield

    async def is_sleeping(self) -> bool:
        return self.asleep


def _requests(core: Core) -> VllmRequests:
    errors = {"overflow_error": KeyError, "client_error": KeyError, "dead_error": KeyError}
    package: Any = SimpleNamespace(version="0.30.0", generate_arguments=frozenset(), **errors)
    return VllmRequests(core, package, RequestLimits(8, 16, 30.0, 10.0))


async def _asked(sleep: VllmSleep, requests: VllmRequests) -> None:
    await sleep.wake()
    requests.submit(VllmRequest(Plan((1, 2), ()), {}))


async def test_an_idle_engine_sleeps_and_requests_wake_it_together() -> None:
    core = Core()
    requests = _requests(core)
    async with VllmSleep(core, requests, 0.2) as sleep:
        await eventually(lambda: sleep.is_asleep)
        await asyncio.gather(*(_asked(sleep, requests) for _ in range(5)))
        assert not core.asleep
        assert len(requests) == 5
        core.finish.set()
        await eventually(lambda: core.asleep)
        assert core.sleeps == 2


async def test_an_engine_with_a_request_does_not_sleep() -> None:
    core = Core()
    requests = _requests(core)
    async with VllmSleep(core, requests, 0.01) as sleep:
        await _asked(sleep, requests)
        for _ in range(5):
            await asyncio.sleep(0.1)
            assert not core.asleep
        core.finish.set()
        await eventually(lambda: core.asleep)


async def test_a_request_that_did_not_wait_is_refused_until_the_engine_is_awake() -> None:
    core = Core()
    requests = _requests(core)
    core.go_on.clear()
    async with VllmSleep(core, requests, 0.01) as sleep:
        await eventually(lambda: core.asleep)
        with pytest.raises(Unavailable, match="sleeps"):
            requests.submit(VllmRequest(Plan((1, 2), ()), {}))
        core.go_on.set()
        await _asked(sleep, requests)
        core.finish.set()


async def test_a_client_that_leaves_a_sleeping_engine_loses_no_other_request() -> None:
    core = Core()
    requests = _requests(core)
    async with VllmSleep(core, requests, 0.1) as sleep:
        await eventually(lambda: core.asleep)
        core.go_on.clear()
        leaving = asyncio.create_task(_asked(sleep, requests))
        staying = asyncio.create_task(_asked(sleep, requests))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        core.go_on.set()
        await staying
        assert len(requests) == 1
        core.finish.set()


async def test_an_engine_that_does_not_wake_has_failed_and_refuses_who_waits() -> None:
    core = Core()
    core.error = RuntimeError("out of memory")
    requests = _requests(core)
    async with VllmSleep(core, requests, 0.1) as sleep:
        await eventually(lambda: core.asleep)
        with pytest.raises(Unavailable, match="out of memory"):
            await _asked(sleep, requests)
    assert requests.failure is not None


async def test_an_engine_without_the_setting_never_sleeps() -> None:
    core = Core()
    async with VllmSleep(core, _requests(core), None) as sleep:
        await asyncio.sleep(0.3)
        assert not sleep.is_idle()
        assert core.sleeps == 0


async def test_an_engine_that_is_told_to_sleeps_at_once_and_not_with_a_request() -> None:
    core = Core()
    requests = _requests(core)
    async with VllmSleep(core, requests, 3600.0) as sleep:
        await _asked(sleep, requests)
        assert not await sleep.fall_asleep()
        core.finish.set()
        await eventually(lambda: not len(requests))
        for sleeps in (1, 2):
            assert await sleep.fall_asleep()
            assert core.asleep
            await sleep.wake()
            assert (core.asleep, core.sleeps) == (False, sleeps)
