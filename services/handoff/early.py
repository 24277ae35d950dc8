"""The owner's side of early handoffs: the blocks of a prompt, under a lease while its other blocks are computed."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.engine.v1 import handoff_pb2
from baton.errors import HandoffLost, PermissionDenied, RequestExists
from runtime.aio import timeout
from services.engines.kv import HeldKv
from services.handoff.leases import Lease, LeaseTable
from services.telemetry.timings import duration

# How much later than its follower a prompt may arrive: the two are called at the same time.
_ARRIVAL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class FinalBlocks:
    """Further blocks that have their final content, the next ones in the order of the tokens.

    With the last of them the prompt is complete, and the lease is that of its handoff.
    """

    lease: Lease
    block_ids: Sequence[int]
    is_complete: bool


class PromptInProgress:
    """A prompt that is being computed, as the engine tells of it and one reader follows it.

    Its lease begins with the first blocks. It is in the lease table as what that lease holds, and frees nothing: until
    the prompt is computed, its blocks belong to the engine.
    """

    def __init__(self, request_id: str, num_tokens: int, holders: frozenset[str], table: "PromptsInProgress") -> None:
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.holders = holders
        self.block_ids: tuple[int, ...] = ()
        self._leases = table.leases
        self._layout_digest = table.layout_digest
        self._lease: Lease | None = None
        self._is_followed = self._is_lost = self._is_over = self._is_handed_over = False
        self._changed = asyncio.Event()

    def computed(self, block_ids: Sequence[int]) -> None:
        # Replaced and never changed: transports read it on their threads.
        self.block_ids = (*self.block_ids, *block_ids)
        self._changed.set()

    def lost(self) -> None:
        self._is_lost = True
        self.block_ids = ()
        self._end_lease()
        self._changed.set()

    async def release(self) -> int:
        """Frees nothing. See HeldBlocks."""
        return 0

    def hold(self, kv: HeldKv) -> Lease:
        """Holds the computed prompt: under the lease that its reader has, if that has been valid throughout."""
        lease = self._lease
        has_the_same = kv.block_ids[: len(self.block_ids)] == self.block_ids
        if lease is not None and has_the_same and self._leases.promote(lease, kv):
            self.block_ids = kv.block_ids
            self._is_handed_over = True
            return lease
        return self._leases.hold(self.request_id, kv, self._layout_digest, self.holders)

    def end(self) -> None:
        """Ends the following. Without a handoff, the blocks read so far are lost."""
        self._is_over = True
        self._end_lease()
        self._changed.set()

    async def follow(self) -> AsyncGenerator[FinalBlocks, None]:
        """Yields blocks as they become final; leaving it early ends the lease. Nothing if there are none until the end.

        Raises HandoffLost once they are lost, and RequestExists for a second reader.
        """
        if self._is_followed:
            raise RequestExists(f"request {self.request_id} is followed already")
        self._is_followed = True
        told = 0
        try:
            while True:
                self._changed.clear()
                lease = self._granted()
                if lease is not None and (len(self.block_ids) > told or self._is_handed_over):
                    known, is_complete = self.block_ids, self._is_handed_over
                    yield FinalBlocks(lease, known[told:], is_complete)
                    told = len(known)
                    if is_complete:
                        return
                    continue
                if self._is_over and lease is None:
                    return
                await self._changed.wait()
        finally:
            self._end_lease()

    def _granted(self) -> Lease | None:
        """The lease, from the first blocks on. Raises HandoffLost if it was there and is not any more."""
        if self._is_handed_over:
            return self._lease
        if self._is_lost:
            raise HandoffLost("the prompt has lost its blocks, and is computed again")
        if self._lease is not None and (self._is_over or self._leases.find(self._lease.handoff_id) is None):
            raise HandoffLost("the prompt was not computed to its end, or its lease has ended")
        if self._lease is None and self.block_ids and not self._is_over:
            self._lease = self._leases.hold(self.request_id, self, self._layout_digest, self.holders)
        return self._lease

    def _end_lease(self) -> None:
        """Ends the lease, unless it is that of the handoff."""
        if self._lease is not None and not self._is_handed_over:
            self._leases.discard(self._lease.handoff_id)


class PromptsInProgress:
    """The prompts that are computed in several steps, by request id, for readers that follow them."""

    def __init__(self, leases: LeaseTable, layout_digest: str) -> None:
        self.leases = leases
        self.layout_digest = layout_digest
        self._prompts: dict[str, PromptInProgress] = {}
        self._arrival = asyncio.Event()

    @contextmanager
    def computing(self, request_id: str, num_tokens: int, holders: frozenset[str]) -> Iterator[PromptInProgress]:
        """Lets a reader follow a prompt while the context is open."""
        prompt = self._prompts[request_id] = PromptInProgress(request_id, num_tokens, holders, self)
        self._arrival.set()
        self._arrival = asyncio.Event()
        try:
            yield prompt
        finally:
            del self._prompts[request_id]
            prompt.end()

    async def find(self, request_id: str, certificate: str) -> PromptInProgress:
        """Returns the prompt of a request, which may arrive a little later. Raises HandoffLost if it does not, and
        PermissionDenied if it is for others.
        """
        try:
            async with timeout(_ARRIVAL_SECONDS):
                while request_id not in self._prompts:
                    await self._arrival.wait()
        except TimeoutError:
            raise HandoffLost("no such prompt is computed here") from None
        prompt = self._prompts[request_id]
        if prompt.holders and certificate not in prompt.holders:
            caller = certificate or "a caller without a certificate"
            raise PermissionDenied(f"{caller} is not authorized for the KV of request {request_id}")
        return prompt


def follow_response(prompt: PromptInProgress, blocks: FinalBlocks) -> handoff_pb2.FollowResponse:
    """Converts what a reader is told to its message."""
    return handoff_pb2.FollowResponse(
        handoff_id=blocks.lease.handoff_id,
        lease=duration(blocks.lease.remaining_seconds),
        layout_digest=blocks.lease.layout_digest,
        num_tokens=prompt.num_tokens,
        block_ids=blocks.block_ids,
        is_complete=blocks.is_complete,
    )
