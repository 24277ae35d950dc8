"""The move of one decode: its full blocks are copied into the other worker's prefix cache while it goes on, then it
yields. What fails before that changes nothing for the stream.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from baton.calls import unary
from baton.engine.v1 import decode_pb2, handoff_pb2
from router.moving.decodes import ReadDecode
from router.workers.handle import WorkerHandle
from rpc.timeouts import KV_TRANSFER_SECONDS
from rpc.tracing.span import Span, entered, optional_attempt, stage_span

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
            attachment=decode.calls.reader,
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
            request_id=decode.ctx.call_id, attachment=decode.calls.reader, readers=self._readers
        )
        answer = await unary(decode.worker.decode.Yield(request, timeout=_ANSWER_SECONDS))
        return answer.is_running
