"""Loans of prefixes between workers: what a prompt leaves in a cache, hints at it, and lenders that change answers."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from support.clients.worker_calls import prompt, sampling
from support.cluster.workers import Running
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import unary
from baton.engine.v1 import handoff_pb2, handoff_pb2_grpc, prefill_pb2
from engine_protocol.fault_injection import FAULT_KEY
from engine_protocol.prefix_hash import block_hashes
from rpc.health import Health
from rpc.server import Service, serve

Change = Callable[[handoff_pb2.LendPrefixResponse], object]
BLOCK_TOKENS = 16
LONG = bytes(range(200))  # twelve full blocks, and a half
FULL = len(LONG) // BLOCK_TOKENS


def source(lender: Running, num_blocks: int = FULL, **fields: object) -> handoff_pb2.PrefixSource:
    worker = lender.worker
    hint = handoff_pb2.PrefixSource(
        worker_id=worker.worker_id, epoch=worker.epoch, address=worker.address, num_blocks=num_blocks
    )
    hint.MergeFrom(handoff_pb2.PrefixSource(**fields))  # type: ignore[arg-type]
    return hint


async def prefill_from(
    borrower: Running, hint: handoff_pb2.PrefixSource | None, text: bytes = LONG, fault: str = "", **asked: str
) -> prefill_pb2.PrefillResponse:
    request = prefill_pb2.PrefillRequest(
        request_id=asked.get("request_id", "r"), prompt=prompt(text), sampling=sampling(), prefix_source=hint
    )
    request.prompt.cache_salt = asked.get("salt", "")
    metadata = [(FAULT_KEY, fault)] if fault else ()
    response = await unary(borrower.calls.prefills.Prefill(request, timeout=PATIENCE_SECONDS, metadata=metadata))
    await borrower.calls.release(response.handoff)
    return response


async def compute(worker: Running, text: bytes = LONG, salt: str = "") -> int:
    """Leaves a prompt in a worker's prefix cache; returns the first token."""
    response = await prefill_from(worker, None, text, salt=salt, request_id="own")
    return response.handoff.first_token.token_id


async def lend(lender: Running, names: Sequence[bytes], **fields: object) -> handoff_pb2.LendPrefixResponse:
    worker = lender.worker
    given = {"epoch": worker.epoch, "layout_digest": worker.engine.facts.layout.digest, **fields}
    request = handoff_pb2.LendPrefixRequest(block_hashes=names, **given)  # type: ignore[arg-type]
    response: handoff_pb2.LendPrefixResponse = await unary(
        lender.calls.handoffs.LendPrefix(request, timeout=PATIENCE_SECONDS)
    )
    return response


def hashes(text: bytes, salt: str = "") -> list[bytes]:
    return block_hashes(text, BLOCK_TOKENS, salt)


async def nothing_is_left(*workers: Running) -> None:
    for worker in workers:
        await eventually(lambda worker=worker: worker.blocks_used == 0 and len(worker.worker.leases) == 0)  # type: ignore[misc]


class Between(handoff_pb2_grpc.HandoffServiceServicer):
    """Passes calls on to a lender, and changes its answers about loans."""

    def __init__(self, lender: Running, change: Change) -> None:
        self._lender = lender.calls.handoffs
        self._change = change

    async def GetPool(self, request: handoff_pb2.GetPoolRequest, context: object) -> handoff_pb2.GetPoolResponse:
        answer: handoff_pb2.GetPoolResponse = await self._lender.GetPool(request)
        return answer

    async def LendPrefix(self, request: Any, context: object) -> handoff_pb2.LendPrefixResponse:
        loan: handoff_pb2.LendPrefixResponse = await self._lender.LendPrefix(request)
        self._change(loan)
        return loan

    async def Renew(self, request: handoff_pb2.RenewRequest, context: object) -> handoff_pb2.RenewResponse:
        answer: handoff_pb2.RenewResponse = await self._lender.Renew(request)
        return answer

    async def Release(self, request: handoff_pb2.ReleaseRequest, context: object) -> handoff_pb2.ReleaseResponse:
        answer: handoff_pb2.ReleaseResponse = await self._lender.Release(request)
        return answer


@asynccontextmanager
async def between(lender: Running, change: Change) -> AsyncIterator[str]:
    service = Service(
        "baton.engine.v1.HandoffService",
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server,
        Between(lender, change),
    )
    async with serve("127.0.0.1:0", [service], health=Health(), drain_seconds=0) as server:
        yield server.address
