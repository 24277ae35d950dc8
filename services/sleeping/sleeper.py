"""One worker's sleep: its requests wait until it has its memory, which it gives back when others want it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from baton.errors import BatonError, ConfigError, EngineFailed, Overloaded, Unavailable
from runtime.aio import timeout, wait_until_done
from runtime.clock import monotonic
from runtime.lasting import lasting
from services.engines.base import Engine, EngineLoad, ReleasesMemory
from services.keeper.client import KeeperClient
from services.sleeping.config import SleepConfig
from services.sleeping.group import Member, Membership, has_to_sleep, may_wake
from services.telemetry import metrics

log = structlog.get_logger(__name__)

# How often a worker looks who wants memory.
_LOOK_SECONDS = 0.1
# The same while another one changes the group.
_RETRY_SECONDS = 0.01
_LONGEST_NAME = 200


class Sleeper:
    """Decides when the engine has its memory. Calls use it from `enter` to `leave`; it sleeps only while none does."""

    def __init__(self, config: SleepConfig, membership: Membership, empty: Member) -> None:
        self._config = config
        self._membership = membership
        self._empty = empty
        self._users: set[object] = set()
        self._waiters: dict[asyncio.Future[None], object] = {}
        self._changed = asyncio.Event()
        self._is_awake = self._is_open = self._is_wanted = self._has_slept = False
        self._asked_at = self._used_at = self._awake_since = 0.0
        self._resume_seconds = 0.0
        self._is_held: Callable[[], bool] = bool

    @property
    def wake_seconds(self) -> float | None:
        """The seconds that it takes to wake, at least; None while requests can run at once."""
        return None if self._is_open else _LOOK_SECONDS + self._resume_seconds

    def added_to(self, load: EngineLoad) -> EngineLoad:
        """The load with the requests that wait for the memory."""
        return replace(load, waiting=load.waiting + len(self._waiters), wake_seconds=self.wake_seconds)

    async def enter(self, user: object, *, has_kv: bool = False) -> None:
        """Waits until the engine has its memory, which it keeps until `leave`.

        A user that has KV in the memory does not wait, since no other worker gets the memory before it is freed. Raises
        Overloaded if that takes too long, and EngineFailed if it cannot have it.
        """
        if self._is_open or has_kv or user in self._users:
            self._users.add(user)
            return
        began = monotonic()
        try:
            async with timeout(self._config.wait_seconds):
                await self._granted(user)
        except TimeoutError:
            seconds = self._config.wait_seconds
            message = f"the model sleeps, and other models have not made room for it for {seconds:g} s"
            raise Overloaded(message, retry_after_seconds=1.0) from None
        finally:
            metrics.WAKE_WAIT_SECONDS.observe(monotonic() - began)

    def leave(self, user: object) -> None:
        """Notes the end of a call; of one that has not entered, too."""
        if user in self._users:
            self._users.remove(user)
            self._used_at = monotonic()
            if not self._users:
                self._changed.set()

    async def acquire(self) -> None:
        """Waits for the memory in which the engine is to start. Raises Unavailable if there is no room in time."""
        before = self._membership.record
        if before is not None and before.is_awake:
            # Of the process that the keeper has replaced, whose KV may still be there.
            self._is_awake = self._has_slept = True
            self._resume_seconds = before.resume_seconds
        waiting = asyncio.ensure_future(self._granted(self))
        try:
            async with timeout(self._config.wait_seconds):
                while not self._is_awake:
                    await asyncio.sleep(_LOOK_SECONDS)
                    own = self._look()
                    self._is_awake = own is not None and own.is_awake
        except TimeoutError:
            seconds = self._config.wait_seconds
            raise Unavailable(f"sleep.group: its workers have not made room for this one for {seconds:g} s") from None
        finally:
            waiting.cancel()
            await wait_until_done(waiting)
        self._is_open = True

    @asynccontextmanager
    async def running(self, engine: Engine, is_held: Callable[[], bool]) -> AsyncIterator[None]:
        """Lets the engine sleep and wake while the context is open; never while something `is_held` for others.

        The first process begins with a short sleep, from which the time to wake is known. Raises ConfigError for an
        engine that cannot sleep, and EngineFailed if that fails.
        """
        memory = engine.releases_memory
        if memory is None:
            raise ConfigError("sleep: engine: memory of a GPU, and of a split model, cannot be released by this engine")
        self._is_held = is_held
        if not self._has_slept and await memory.release_memory():
            await self._resume(memory)
        task = asyncio.create_task(lasting("sleep", lambda: self._run(memory)))
        try:
            yield
        finally:
            task.cancel()
            await wait_until_done(task)

    async def _run(self, memory: ReleasesMemory) -> None:
        while True:
            self._changed.clear()
            own = self._look()
            if own is not None and own.is_awake and not self._is_awake:
                await self._wake(memory)
            elif own is not None and self._is_awake:
                await self._fall_asleep(memory) if self._is_wanted else self._open()
            try:
                async with timeout(_RETRY_SECONDS if own is None else _LOOK_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _look(self) -> Member | None:
        """Reads and writes the group. `is_awake` of what it returns means that the memory is this worker's."""
        return self._membership.update(self._decide)

    def _decide(self, others: Sequence[Member]) -> Member:
        now = monotonic()
        own = replace(
            self._empty,
            is_awake=self._is_awake,
            is_busy=bool(self._users) or self._is_held(),
            awake_since=self._awake_since,
            used_at=self._used_at,
            wants_since=self._asked_at if self._waiters and not self._is_awake else None,
            resume_seconds=self._resume_seconds,
        )
        if may_wake(own, others):
            self._awake_since = now
            return replace(own, is_awake=True, is_busy=True, awake_since=now, wants_since=None)
        self._is_wanted = has_to_sleep(own, others, now - self._config.turn_seconds)
        return own

    async def _wake(self, memory: ReleasesMemory) -> None:
        try:
            await self._resume(memory)
        except BatonError as error:
            log.error("the model cannot be woken", error=error.message)
            self._fail(error)
            return
        self._is_awake = True
        metrics.WAKES.inc()
        metrics.ASLEEP.set(0)
        log.info("the model is awake", seconds=round(self._resume_seconds, 3))
        self._open()

    async def _resume(self, memory: ReleasesMemory) -> None:
        began = monotonic()
        await memory.resume_memory()
        self._resume_seconds = monotonic() - began

    async def _fall_asleep(self, memory: ReleasesMemory) -> None:
        """Admits no further call, and gives the memory back once nothing uses it."""
        self._is_open = False
        if self._users or self._is_held() or not await memory.release_memory():
            return
        self._is_awake = False
        metrics.ASLEEP.set(1)
        log.info("the model sleeps")
        self._changed.set()  # the others are to see it at once

    def _open(self) -> None:
        """Lets all calls in that wait."""
        self._is_open = True
        for waiter, user in self._waiters.items():
            if not waiter.done():
                self._users.add(user)
                waiter.set_result(None)

    def _fail(self, error: BatonError) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(EngineFailed(f"the model cannot be woken: {error.message}"))

    async def _granted(self, user: object) -> None:
        waiter = asyncio.get_running_loop().create_future()
        if not self._waiters:
            self._asked_at = monotonic()
        self._waiters[waiter] = user
        self._changed.set()
        try:
            await waiter
        finally:
            del self._waiters[waiter]


@asynccontextmanager
async def open_sleeper(
    config: SleepConfig, worker_id: str, keeper: KeeperClient | None
) -> AsyncIterator[Sleeper | None]:
    """Joins the configured group, and waits for the memory in which the engine is to start; None without a group.

    Raises what Membership.join and Sleeper.acquire raise. The group is left at the end, when the engine has ended.
    """
    if config.group is None:
        yield None
        return
    empty = Member(worker_id[:_LONGEST_NAME], config.bytes, config.group_bytes)
    with Membership.join(config.group.expanduser(), empty, keeper) as membership:
        sleeper = Sleeper(config, membership, empty)
        await sleeper.acquire()
        yield sleeper
