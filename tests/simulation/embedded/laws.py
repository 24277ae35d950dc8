"""The laws of an embedded engine, which hold whatever happens to it."""

from collections.abc import Sequence
from typing import Any

import structlog

from services.engines.pytorch.kv_cache.blocks import HashChain
from services.engines.pytorch.kv_cache.events import BlockMoved, BlockRemoved, BlockStored
from simulation.embedded.core import BLOCK_TOKENS, Core, kv_of


class Laws:
    """The reports to a router about the cache, the right content of each block, and the problems so far.

    `core` and `words`, the pool's memory, are those of the present process. Errors in the log are problems unless
    `may_fail`, and unless a process has died.
    """

    core: Core
    words: Any

    def __init__(self, *, may_fail: bool) -> None:
        self.problems: list[str] = []
        self.has_died = False
        self._may_fail = may_fail
        self._known: set[bytes] = set()  # the blocks that a router takes for cached
        self._kv: dict[bytes, list[int]] = {}  # the content of each block that was ever named

    def began(self) -> None:
        """A process has begun, and tells of all that it has found."""
        self._known = {*self.core.recovered}

    def log(self, _logger: Any, method: str, event: Any) -> Any:
        """No block is damaged: nothing here damages any. Nothing fails that was not made to."""
        is_damage = event["event"] == "kv block is damaged"
        if is_damage or (method in ("warning", "error") and not self._may_fail and not self.has_died):
            self.problems.append(f"NoUnexplainedError: {event}")
        raise structlog.DropEvent

    def hear(self, event: BlockStored | BlockRemoved | BlockMoved) -> None:
        """A router is told."""
        (self._known.discard if isinstance(event, BlockRemoved) else self._known.add)(event.block_hash)

    def name(self, ids: Sequence[int]) -> list[bytes]:
        """The names of the full blocks of these ids."""
        names, kv = HashChain("", BLOCK_TOKENS).upto(ids, len(ids)), kv_of(ids)
        for index, name in enumerate(names):
            self._kv[name] = kv[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
        return names

    def check(self, kv: list[int], blocks: list[int], count: int) -> None:
        """KV is of its prompt: the first `count` tokens' is in these blocks."""
        found = self.words[blocks].flatten().tolist()[:count] if count else []
        if found != kv[:count]:
            index = next(at for at in range(count) if found[at] != kv[at])
            self.problems.append(f"KvIsOfItsPrompt: token {index} of {count}, block {blocks[index // BLOCK_TOKENS]}")

    def look(self) -> None:
        """The cache has what it says, and a router is told of what it has."""
        pool = self.core._pool
        for block, name in pool._hash_of.items():
            if self.words[block].tolist() != self._kv.get(name):
                self.problems.append(f"KvIsOfItsPrompt: cached block {block}")
        there = set(pool._block_of)
        if self.core.tiers is not None:
            directory, tiers = self.core.tiers.directory, self.core.tiers
            there |= directory._host.slot_of.keys() | directory._disk.slot_of.keys() | tiers._loading.keys()
        if not there >= self._known:
            self.problems.append(f"a router is told of {len(self._known - there)} blocks that are nowhere")
        if missing := set(pool._block_of) - self._known:
            self.problems.append(f"a router is not told of {len(missing)} blocks")

    def nothing_is_left(self, unended: int) -> None:
        """After the end of all requests."""
        core, scheduler = self.core, self.core.scheduler
        left = {
            "unended": unended,
            "used": core._pool.used,
            "kept": len(scheduler.kept._references),
            "held": len(scheduler.held) + len(core._outcomes.held) + scheduler.reserved,
            "queues": len(scheduler.waiting) + len(scheduler.running) + len(scheduler.loading),
        }
        if core.tiers is not None:
            core.tiers.poll()
            tiers, directory = core.tiers, core.tiers.directory
            left |= {
                "loading": len(tiers._loading) + len(tiers._expected) + len(tiers._waiting) + len(tiers._back_in_pool),
                "leaving": len(tiers._leaving) + len(tiers._arriving) + len(directory.unwritten),
            }
            for slots in (directory._host, directory._disk):
                left["slots"] = slots.total - len(slots.free) - len(slots.slot_of)
        if core.journal is not None:
            left["journal"] = core.journal._num_slots - len(core.journal._free)
        if any(left.values()):
            self.problems.append(f"NothingIsLeft: {left}")
