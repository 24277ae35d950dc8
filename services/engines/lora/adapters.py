"""Which adapters are in memory, which requests use them, and how they come and go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import structlog
from typing_extensions import Self

from baton.errors import ConfigError, InvalidRequest, LoraNotHere, Overloaded
from runtime.aio import TaskGroup
from services.engines.lora.catalog import NOTHING, CatalogEntry, read_catalog
from services.engines.lora.inventory import LoraInventory, LoraRejection
from services.engines.lora.options import LoraOptions
from services.engines.prompt import Lora

_log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0

Weights = TypeVar("Weights")


class LoraSlots(Protocol[Weights]):
    """An engine's places for adapters, numbered from 0. All but `read` are used in the event loop, one at a time."""

    def read(self, entry: CatalogEntry) -> Weights:
        """Reads the content that the catalog names, and checks that it fits the model. Blocking.

        Raises ConfigError naming the key or the weight, or if the files have changed.
        """

    async def install(self, slot: int, weights: Weights) -> None:
        """Writes an adapter to a slot that no request uses. Raises ConfigError if the engine refuses it."""

    async def clear(self, slot: int) -> None:
        """Frees what a slot's adapter occupies; no request uses it."""


@dataclass(eq=False, slots=True)
class _Loaded:
    """An adapter in memory. Its slot is free for another one once it is `retired` and has no users."""

    entry: CatalogEntry
    slot: int
    last_used: int = 0
    users: int = 0
    is_retired: bool = False
    freed: asyncio.Event = field(default_factory=asyncio.Event)


class LoraAdapters(Generic[Weights]):
    """ServesLoras for the slots of an engine. An async context manager: entering reads the folder and loads `load`.

    Used in the event loop. Leaving waits for loads that have begun.
    """

    def __init__(self, options: LoraOptions, slots: LoraSlots[Weights]) -> None:
        self._options = options
        self._slots = slots
        self._catalog = NOTHING
        self._loaded: dict[str, _Loaded] = {}
        self._free = list(range(options.max_loaded))
        self._failed: dict[Lora, str] = {}  # adapters whose weights could not be read when they were needed
        self._unloaded: set[str] = set()  # by an operator: not to be loaded on demand
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._placing = asyncio.Lock()
        self._uses = 0
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises ConfigError if the folder, or an adapter of `load`, cannot be read."""
        self._group = await self._resources.enter_async_context(TaskGroup())
        try:
            await self._load_first()
        except BaseException:
            # Not through the group's exit, which would raise an ExceptionGroup.
            await self._resources.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._resources.aclose()

    async def _load_first(self) -> None:
        await self.refresh()
        for rejection in self._catalog.rejected:
            _log.warning("adapter rejected", adapter=rejection.name, reason=rejection.reason)
        for name in self._options.load:
            try:
                await self.load(name)
            except InvalidRequest as error:
                raise ConfigError(f"engine.lora.load: {name}: {error.violations[0].description}") from error

    def inventory(self) -> LoraInventory:
        rejected = [LoraRejection(lora.name, reason) for lora, reason in self._failed.items()]
        return LoraInventory(
            loaded=tuple(one.entry.ranked for _, one in sorted(self._loaded.items())),
            available=tuple(entry.ranked for _, entry in sorted(self._available().items())),
            rejected=(*self._catalog.rejected, *rejected),
            max_loaded=self._options.max_loaded,
        )

    def slot_of(self, lora: Lora) -> int:
        """The slot of an adapter that is in use. Raises LoraNotHere."""
        found = self._loaded.get(lora.name)
        if found is None or found.entry.ranked.lora != lora:
            raise self._not_here(lora)
        return found.slot

    def require(self, lora: Lora) -> None:
        loaded, available = self._loaded.get(lora.name), self._available().get(lora.name)
        if lora not in [one.ranked.lora for one in (loaded.entry if loaded else None, available) if one]:
            raise self._not_here(lora)

    @asynccontextmanager
    async def use(self, lora: Lora) -> AsyncIterator[None]:
        used = await self._acquire(lora)
        try:
            yield
        finally:
            used.users -= 1
            self._free_if_unused(used)

    async def refresh(self) -> None:
        options = self._options
        self._catalog = await asyncio.to_thread(read_catalog, options.folder, options.max_rank, self._catalog)
        self._failed.clear()

    async def load(self, name: str) -> None:
        await self.refresh()
        entry = self._catalog.entries.get(name)
        if entry is None:
            reasons = [one.reason for one in self._catalog.rejected if one.name == name]
            text = reasons[0] if reasons else f"no adapter {name[:128]!r} in the folder; it has {self._names()}"
            raise InvalidRequest.of("name", text)
        self._unloaded.discard(name)
        try:
            await self._load_once(entry)
        except ConfigError as error:
            raise InvalidRequest.of("name", error.message) from error

    async def unload(self, name: str) -> None:
        if name in self._loading:
            await asyncio.wait([self._loading[name]])
        if name not in self._loaded and name not in self._available():
            raise InvalidRequest.of("name", f"no adapter {name[:128]!r} is here; known are {self._names()}")
        self._unloaded.add(name)
        if (loaded := self._loaded.get(name)) is not None:
            self._retire(loaded)
            await loaded.freed.wait()
            async with self._placing:
                # Unless another adapter has taken it by now.
                if loaded.slot in self._free:
                    await self._slots.clear(loaded.slot)
            _log.info("adapter unloaded", adapter=name)

    async def _acquire(self, lora: Lora) -> _Loaded:
        while True:
            found = self._loaded.get(lora.name)
            if found is not None and found.entry.ranked.lora == lora:
                self._uses += 1
                found.users, found.last_used = found.users + 1, self._uses
                return found
            self.require(lora)
            entry = self._available()[lora.name]
            try:
                await self._load_once(entry)
            except ConfigError as error:
                self._failed[lora] = error.message
                raise LoraNotHere(f"the adapter {lora.name} cannot be loaded: {error.message}") from error

    async def _load_once(self, entry: CatalogEntry) -> None:
        """Loads an adapter, together with others that wait for it. A cancelled caller does not stop the load."""
        name = entry.ranked.lora.name
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.ensure_future(self._load(entry))
            task.add_done_callback(lambda _done: self._loading.pop(name))
            self._group.create_task(_end_of(task))
        await asyncio.shield(task)

    async def _load(self, entry: CatalogEntry) -> None:
        lora = entry.ranked.lora
        old = self._loaded.get(lora.name)
        if old is not None and old.entry.ranked.lora == lora:
            return
        weights = await asyncio.to_thread(self._slots.read, entry)
        async with self._placing:
            slot = self._acquire_slot(lora.name)
            try:
                await self._slots.install(slot, weights)
            except BaseException:
                self._free.append(slot)
                raise
        if (old := self._loaded.get(lora.name)) is not None:
            self._retire(old)
        self._loaded[lora.name] = _Loaded(entry, slot, last_used=self._uses)
        _log.info("adapter loaded", adapter=lora.name, digest=lora.digest[:12], rank=entry.ranked.rank)

    def _acquire_slot(self, name: str) -> int:
        """A free slot, or that of the adapter whose last use is the longest ago. Raises Overloaded."""
        if not self._free:
            idle = [one for one in self._loaded.values() if not one.users]
            if not idle:
                text = f"all {self._options.max_loaded} places for adapters are in use, and {name} needs one"
                raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)
            self._retire(min(idle, key=lambda one: one.last_used))
        self._free.sort()
        return self._free.pop(0)

    def _retire(self, loaded: _Loaded) -> None:
        """Takes an adapter away from new requests."""
        if self._loaded.get(loaded.entry.ranked.lora.name) is loaded:
            del self._loaded[loaded.entry.ranked.lora.name]
        loaded.is_retired = True
        self._free_if_unused(loaded)

    def _free_if_unused(self, loaded: _Loaded) -> None:
        if loaded.is_retired and not loaded.users and not loaded.freed.is_set():
            loaded.freed.set()
            self._free.append(loaded.slot)

    def _available(self) -> dict[str, CatalogEntry]:
        if not self._options.on_demand:
            return {}
        return {
            name: entry
            for name, entry in self._catalog.entries.items()
            if name not in self._unloaded
            and entry.ranked.lora not in self._failed
            and (name not in self._loaded or self._loaded[name].entry.ranked.lora != entry.ranked.lora)
        }

    def _names(self) -> str:
        return ", ".join(sorted({*self._loaded, *self._catalog.entries})) or "none"

    def _not_here(self, lora: Lora) -> LoraNotHere:
        return LoraNotHere(f"no adapter {lora.name} of content {lora.digest[:12]}; here are {self._names()}")


async def _end_of(task: "asyncio.Task[None]") -> None:
    """Waits for a load, whose error is for those who asked for it."""
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
