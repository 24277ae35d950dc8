"""Sleep of an idle vLLM, whose weights are in the host's memory meanwhile. The next request wakes it."""

import asyncio
from typing import Any

import structlog
from typing_extensions import Self

from baton.errors import EngineFailed
from runtime.aio import timeout
from services.engines.vllm.requests.inflight import VllmRequests

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.1
# The first sleep takes memory of the host for the weights; waking takes part of a second.
_MOST_SECONDS = 120.0


class VllmSleep:
    """Puts the engine to sleep after `seconds` without a request; None never does. An async context manager.

    One task does both, so that a client that leaves interrupts neither. If vLLM fails at one, the engine has failed.
    """

    def __init__(self, llm: Any, requests: VllmRequests, seconds: float | None) -> None:
        self._llm = llm
        self._requests = requests
        self._seconds = seconds
        self._awake = asyncio.Event()
        self._awake.set()
        self._asleep, self._wanted = asyncio.Event(), asyncio.Event()
        self._is_told_to = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    @property
    def is_asleep(self) -> bool:
        """True from when it begins to fall asleep until it is awake again."""
        return self._requests.is_asleep

    def is_idle(self) -> bool:
        """True if an engine that may sleep has no requests: it is not tested meanwhile, which would keep it awake."""
        return self._seconds is not None and not len(self._requests)

    async def fall_asleep(self) -> bool:
        """Returns when it sleeps; False if it has requests. Raises EngineFailed if it does not fall asleep in time."""
        if len(self._requests):
            return False
        self._is_told_to = True
        try:
            async with timeout(2 * _MOST_SECONDS):
                await self._asleep.wait()
        except TimeoutError as error:
            raise EngineFailed("vLLM does not fall asleep") from error
        finally:
            self._is_told_to = False
        return True

    async def wake(self) -> None:
        """Returns when vLLM is awake. Submit before the next await. Raises EngineFailed if it does not wake in time."""
        if self._awake.is_set():
            return
        self._wanted.set()
        try:
            async with timeout(2 * _MOST_SECONDS):
                await self._awake.wait()
        except TimeoutError as error:
            raise EngineFailed("vLLM does not wake") from error

    async def _run(self) -> None:
        while self._seconds is not None:
            await self._become_idle(self._seconds)
            await self._sleep()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._requests.fail(error)
        # Those that wait are refused when they submit.
        self._awake.set()

    async def _become_idle(self, seconds: float) -> None:
        while len(self._requests) or (  # noqa: ASYNC110 - of several conditions
            self._requests.quiet_seconds < seconds and not self._is_told_to
        ):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _sleep(self) -> None:
        self._requests.is_asleep = True
        self._awake.clear()
        self._wanted.clear()
        async with timeout(_MOST_SECONDS):
            await self._llm.sleep(level=1)
        log.info("vllm sleeps")
        self._asleep.set()
        await self._wanted.wait()
        self._asleep.clear()
        async with timeout(_MOST_SECONDS):
            await self._llm.wake_up()
        self._requests.progressed()
        self._requests.is_asleep = False
        self._awake.set()
