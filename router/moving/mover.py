"""Chooses the decodes that this router moves: those of workers that end, and some of workers that want to give away."""

import asyncio
from collections.abc import Sequence

import structlog

from baton.errors import BatonError
from router.config import MovingConfig
from router.moving.decodes import ReadDecode, ReadDecodes
from router.moving.move import Move
from router.placement.placer import Placer
from router.telemetry import metrics
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle
from runtime.aio import TaskGroup, timeout
from runtime.clock import monotonic

log = structlog.get_logger(__name__)

# How soon another look is worth it while a worker has decodes to give away.
_LOOK_SECONDS = 0.1
# A decode whose move has failed stays where it is for so long.
_AGAIN_SECONDS = 0.5
# A worker's report of its load comes in less.
_REPORT_SECONDS = 0.25
# An answer that has yielded goes on in less; one that has not is not waited for.
_YIELDING_SECONDS = 5.0


class Mover:
    """Moves decodes off workers. Routers do not know of each other: each moves its share."""

    def __init__(self, cluster: Cluster, placer: Placer, decodes: ReadDecodes, config: MovingConfig) -> None:
        self._cluster = cluster
        self._placer = placer
        self._decodes = decodes
        self._at_once = config.at_once
        # Of workers that want to give some away: when decodes of theirs were moved, which a report may not tell of yet.
        self._moved: dict[WorkerHandle, list[float]] = {}

    async def follow(self) -> None:
        """Moves decodes, until cancelled."""
        async with TaskGroup() as group:
            while True:
                changed = asyncio.ensure_future(self._cluster.change())
                try:
                    is_wanted = self._begin_moves(group)
                    await asyncio.wait([changed], timeout=_LOOK_SECONDS if is_wanted else None)
                finally:
                    changed.cancel()

    def _begin_moves(self, group: TaskGroup) -> bool:
        """Begins moves. True if a worker wants some: then it looks again."""
        known, is_wanted = set(self._cluster.workers), False
        self._forget_moved()
        for worker, decodes in tuple(self._decodes.by_worker.items()):
            ends = worker.record.draining or worker not in known
            lately = self._moved.get(worker, ())
            count = len(decodes) if ends else _share(worker, len(decodes)) - len(lately)
            is_wanted |= count > 0 or bool(lately)
            # Looked at whenever a load changes: the decodes themselves only if some of them are to go.
            if count > 0:
                moving = sum(decode.move is not None for decode in decodes)
                for decode in self._able(decodes)[: max(0, min(count, self._at_once) - moving)]:
                    decode.move = group.create_task(self._run(decode, needs_room=not ends))
        return is_wanted

    def _forget_moved(self) -> None:
        """Keeps the moves so late that the worker's load may still count their decodes."""
        after = monotonic() - _REPORT_SECONDS
        lately = {worker: [at for at in times if at > after] for worker, times in self._moved.items()}
        self._moved = {worker: times for worker, times in lately.items() if times}

    def _able(self, decodes: dict[ReadDecode, None]) -> Sequence[ReadDecode]:
        """Those that can be moved now; those with the most to generate come first."""
        now = monotonic()
        able = [one for one in decodes if one.emitted and one.move is None and one.not_before <= now]
        return sorted(able, key=lambda decode: -decode.tokens_left)

    async def _run(self, decode: ReadDecode, *, needs_room: bool) -> None:
        try:
            move = self._move_of(decode, needs_room=needs_room)
            if move is not None and await move.run():
                self._moved.setdefault(decode.worker, []).append(monotonic())
                async with timeout(_YIELDING_SECONDS):
                    await decode.ended.wait()
        except (BatonError, TimeoutError) as error:
            # The stream has not noticed anything, or goes on as after any other failure.
            metrics.MOVES.labels("failed").inc()
            log.info("decode not moved", call_id=decode.ctx.call_id, reason=str(error))
        finally:
            decode.move = None
            decode.not_before = monotonic() + _AGAIN_SECONDS

    def _move_of(self, decode: ReadDecode, *, needs_room: bool) -> Move | None:
        """The move of a decode to the best worker for it; None if no other one can take it."""
        targets = self._placer.move_targets(decode.request, decode.num_tokens + 1, decode.worker)
        if needs_room:
            targets = [target for target in targets if _has_room(target)]
        if not targets:
            return None
        readers = [target.record.certificate for target in targets]
        block_tokens = self._cluster.model(decode.request.model).block_tokens
        return Move(decode, self._placer.choose(decode.request, targets), readers, block_tokens)


def _share(worker: WorkerHandle, own: int) -> int:
    """This router's part of what a worker wants to give away: it reads `own` of its decodes."""
    running = max(own, worker.load.running)
    return -(-worker.load.shed * own // running) if running else 0


def _has_room(worker: WorkerHandle) -> bool:
    """True if a decode more will not fill its pool soon."""
    load = worker.load
    return load.blocks_used <= 0.85 * load.blocks_total
