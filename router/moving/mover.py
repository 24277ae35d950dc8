"""Chooses the decodes that this router moves: those of workers that end, and some of workers that want to give away.

The move of one decode: its full blocks are copied into the other worker's prefix cache while it goes on, then it
yields. What fails before that changes nothing for the stream.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import structlog

from baton.calls import unary
from baton.engine.v1 import decode_pb2, handoff_pb2
from baton.errors import BatonError
from router.config import MovingConfig
from router.moving.decodes import ReadDecode, ReadDecodes
from router.placement.placer import Placer
from router.telemetry import metrics
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle
from rpc.timeouts import KV_TRANSFER_SECONDS
from rpc.tracing.span import Span, entered, optional_attempt, stage_span
from runtime.aio import TaskGroup, timeout
from runtime.clock import monotonic

# Less than this is copied after the decode has yielded: another round would take as long.
_MOST_BLOCKS_LEFT = 2
_MOST_ROUNDS = 4
_ANSWER_SECONDS = 2.0


class Move:
    """Moves one decode to `target`. `readers` are the certificates of all workers that may go on with it."""

    def __init__(self, decode: ReadDecode, target: WorkerHandle, readers: Sequence[str], block_tokens: int) -> None:
        self._decode = decode
        self._target = target
        self._readers = [reader for reader in readers if reader]
        self._block_tokens = block_tokens

    async def run(self) -> bool:
        """Copies, and lets the decode yield. False if it does not run any more, or cannot. Raises BatonError."""
        decode = self._decode
        names = {
            "baton.move.source": decode.worker.record.worker_id,
            "baton.move.target": self._target.record.worker_id,
        }
        with ExitStack() as stack:
            stack.enter_context(decode.worker.keep_open())
            stack.enter_context(self._target.keep_open())
            stack.enter_context(entered(decode.span))
            span = stack.enter_context(stage_span("move", names))
            stack.enter_context(optional_attempt())
            await self._warm(span)
            decode.target = self._target
            return await self._yield()

    async def _warm(self, span: Span) -> None:
        copied = num_bytes = rounds = 0
        while rounds < _MOST_ROUNDS and self._decode.num_tokens - copied > _MOST_BLOCKS_LEFT * self._block_tokens:
            lent = await self._lend()
            if lent.num_tokens <= copied:
                # Its worker has needed its blocks, and computes it again.
                if lent.handoff_id:
                    await self._decode.calls.release(self._decode.worker, lent)
                break
            num_bytes += await self._copy(lent)
            copied, rounds = lent.num_tokens, rounds + 1
        span.set({"baton.move.rounds": rounds, "baton.move.bytes": num_bytes, "baton.move.tokens": copied})

    async def _lend(self) -> handoff_pb2.KvHandoff:
        """The blocks that are full now; without an id if there are none."""
        decode = self._decode
        request = decode_pb2.LendBlocksRequest(
            request_id=decode.ctx.call_id,
            attachment=decode.calls.reader.attachment,
            execution=decode.calls.reader.execution,
            readers=self._readers,
            num_tokens=decode.num_tokens,
        )
        answer = await unary(decode.worker.decode.LendBlocks(request, timeout=_ANSWER_SECONDS))
        return answer.handoff

    async def _copy(self, lent: handoff_pb2.KvHandoff) -> int:
        decode = self._decode
        request = decode_pb2.WarmRequest(
            request_id=decode.ctx.call_id, model=decode.request.model, emitted=decode.emitted, handoff=lent
        )
        request.prompt.CopyFrom(decode.prompt)
        seconds = min(KV_TRANSFER_SECONDS, decode.ctx.deadline.remaining_seconds)
        metadata = decode.calls.next_metadata
        try:
            answer = await unary(self._target.decode.Warm(request, timeout=seconds, metadata=metadata))
        except BaseException:
            # The target releases what it has begun to read. Without this a refusal would leave it to the lease.
            await decode.calls.release(decode.worker, lent)
            raise
        return answer.num_bytes

    async def _yield(self) -> bool:
        decode = self._decode
        request = decode_pb2.YieldRequest(
            request_id=decode.ctx.call_id,
            attachment=decode.calls.reader.attachment,
            execution=decode.calls.reader.execution,
            readers=self._readers,
        )
        answer = await unary(decode.worker.decode.Yield(request, timeout=_ANSWER_SECONDS))
        return answer.is_running


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
                    await self._decodes.ended(decode)
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
