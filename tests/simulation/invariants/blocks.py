"""A block has one owner, and no token comes from KV that is unconfirmed, reused, or another prompt's."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from baton.errors import EngineFailed
from services.engines.memory.shared_pool import Scratch
from services.engines.simulated.blocks import Blocks, Contents
from services.engines.simulated.engine import SimulatedEngine
from services.handoff.leases import LeaseTable, Released
from simulation.entropy import Time
from simulation.invariants.base import Invariant, calls_of, engine_of
from simulation.loop import NODE
from simulation.transport import record_pulls

_LONGER_SECONDS = 1.0


class BlocksHaveOneOwner(Invariant):
    """Each block has as many owners as references, a free one has none, and none is released that has no owner."""

    def install(self) -> None:
        release = Blocks.release

        def releasing(blocks: Blocks, block_ids: Any) -> None:
            for block, count in Counter(block_ids).items():
                if blocks._references[block] < count:
                    self.problem(f"block {block} is released {count} times with {blocks._references[block]} references")
            release(blocks, block_ids)

        Blocks.release = releasing  # type: ignore[method-assign]

    def look(self) -> None:
        for name, worker in self.workers():
            engine = engine_of(worker)
            for rank in engine._ranks.all if engine is not None else ():
                if rank.blocks.used:
                    self._check(name, rank)

    def end(self) -> None:
        for name, worker in self.workers():
            engine = engine_of(worker)
            for rank in engine._ranks.all if engine is not None else ():
                self._check(name, rank)

    def _check(self, name: str, rank: Any) -> None:
        blocks = rank.blocks
        free, cached = set(blocks._free), blocks._evictable
        if len(free) != len(blocks._free) or not free.isdisjoint(cached):
            self.problem(f"{name}: a block is free twice")
        for block, count in blocks._references.items():
            if count < 0 or (count == 0) != (block in cached or block in free):
                self.problem(
                    f"{name}: block {block} has {count} references, and is {'free' if block in free else 'used'}"
                )
                return
        owners: dict[int, int] = {}
        for sequence in rank.scheduler.running:
            for block in sequence.blocks:
                owners[block] = owners.get(block, 0) + 1
        for block, count in owners.items():
            if count > blocks._references[block]:
                self.problem(f"{name}: block {block} has {count} owners and {blocks._references[block]} references")


class KvIsOfItsPrompt(Invariant):
    """The bytes of pulled KV are those of the prompt: the engine compares all of them before the first token."""

    def install(self) -> None:
        # Where it finds out: a request that fails there may be right elsewhere.
        verify, register = Contents.verify, Contents.register

        def verifying(contents: Contents, sequence: Any) -> None:
            self._watch(verify, contents, sequence)

        def registering(contents: Contents, block_ids: Any, hashes: Any) -> None:
            self._watch(register, contents, block_ids, hashes)

        Contents.verify = verifying  # type: ignore[method-assign]
        Contents.register = registering  # type: ignore[method-assign]

    def _watch(self, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
        except EngineFailed as error:
            node = NODE.get()
            self.problem(f"at {node.name if node else '-'}: {error}")
            raise


class KvIsConfirmed(Invariant):
    """A decode begins with pulled blocks only after their owner has said that its lease held throughout."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._confirmed: set[str] = set()
        self._pulled: dict[tuple[Any, int], str] = {}

    def install(self) -> None:
        held: set[str] = set()
        release, adopt, pulled, confirmed = LeaseTable.release, SimulatedEngine._adopt, self._pulled, self._confirmed

        async def releasing(table: LeaseTable, handoff_id: str, reader: str = "") -> Released:
            if table.find(handoff_id) is not None:
                held.add(handoff_id)
            # A call that is repeated gets the answer of the first one, which may still be at work.
            is_held = handoff_id in held
            answer = await release(table, handoff_id, reader)
            if answer.still_valid and not is_held:
                self.problem("a lease is confirmed that is not held")
            if answer.still_valid:
                confirmed.add(handoff_id)
            return answer

        def adopting(engine: SimulatedEngine, kv: Any, *arguments: Any) -> Any:
            reservation = kv.reservation
            for block in reservation.block_ids[reservation.cached_blocks :]:
                handoff_id = pulled.pop((NODE.get(), block), None)
                if handoff_id is not None and handoff_id not in confirmed:
                    self.problem(f"a decode begins with block {block}, whose owner has not confirmed it")
            return adopt(engine, kv, *arguments)

        LeaseTable.release = releasing  # type: ignore[method-assign]
        SimulatedEngine._adopt = adopting  # type: ignore[method-assign]
        record_pulls(self._note)

    def _note(self, reader: Any, transfer: Any) -> None:
        if isinstance(transfer.memory, Scratch):
            return  # embeddings, whose blocks are no KV's
        for block in transfer.destination:
            if transfer.handoff_id:
                self._pulled[reader, block] = transfer.handoff_id


class EngineFollowsCalls(Invariant):
    """An engine computes what a call or a kept answer waits for: an abort reaches it."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._since: dict[str, float] = {}

    def look(self) -> None:
        for name, worker in self.workers():
            engine = engine_of(worker)
            if engine is None:
                continue
            items = sum(rank.requests for rank in engine._ranks.all)
            if items <= len(calls_of(worker)) + len(worker.kept):
                self._since.pop(name, None)
            elif Time.now - self._since.setdefault(name, Time.now) > _LONGER_SECONDS:
                self.problem(f"{name}: {items} sequences for {len(calls_of(worker))} calls")
                self._since[name] = Time.now
