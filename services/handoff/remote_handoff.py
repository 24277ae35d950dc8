"""Handoffs as readers get them: values read from messages, and checks of every number in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.engine.v1 import handoff_pb2
from baton.errors import FieldViolation, InvalidRequest, LayoutMismatch, LoraMismatch
from services.engines.kv import KvLayout, packed_ids
from services.engines.prompt import Prompt
from services.requests.bounds import require_names
from services.telemetry.timings import as_seconds

_REQUIRED = ("handoff_id", "address")


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """A lease on blocks of another worker's pool, as received and not yet checked."""

    handoff_id: str = field(repr=False)
    worker_id: str
    epoch: int
    address: str
    lease_seconds: float
    layout_digest: str
    num_bytes: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Handoff(LeasedBlocks):
    """A lease on KV, and the first token, which was sampled from it."""

    num_tokens: int
    first_token: int
    engine_state: bytes = field(default=b"", repr=False)  # of an engine that transfers KV itself
    lora_digest: str = ""  # of the adapter that computed it
    is_yielded: bool = False  # by a decode: its router releases it if it is not taken over


def without_lease(worker_id: str, epoch: int, address: str) -> LeasedBlocks:
    """A worker that may hand over later: no blocks, and no lease yet."""
    return LeasedBlocks("", worker_id, epoch, address, 0.0, "", 0, ())


def read_handoff(message: handoff_pb2.KvHandoff) -> Handoff:
    """Returns a handoff from its message; `check_handoff` and `check_blocks` check its numbers.

    Raises InvalidRequest if the id or the address of the owner is empty, or too long.
    """
    violations = [FieldViolation(f"handoff.{name}", "is empty") for name in _REQUIRED if not getattr(message, name)]
    if violations:
        raise InvalidRequest(violations)
    require_names(handoff__handoff_id=message.handoff_id, handoff__address=message.address)
    require_names(handoff__worker_id=message.worker_id, handoff__lora_digest=message.lora_digest)
    return Handoff(
        handoff_id=message.handoff_id,
        worker_id=message.worker_id,
        epoch=message.epoch,
        address=message.address,
        lease_seconds=as_seconds(message.lease),
        layout_digest=message.layout_digest,
        num_tokens=message.num_tokens,
        num_bytes=message.num_bytes,
        block_ids=packed_ids(tuple(message.block_ids)),
        first_token=message.first_token.token_id,
        engine_state=message.engine_state,
        lora_digest=message.lora_digest,
        is_yielded=message.is_yielded,
    )


def check_handoff(handoff: Handoff, prompt: Prompt, layout: KvLayout) -> None:
    """Raises LayoutMismatch, LoraMismatch, or InvalidRequest naming every field that contradicts the prompt or
    another field.
    """
    _check_layout(handoff, layout)
    _check_lora(handoff, prompt)
    violations = []
    blocks = len(handoff.block_ids)
    if not (handoff.num_tokens > 0 and -(-handoff.num_tokens // layout.block_tokens) == blocks):
        text = f"{handoff.num_tokens} tokens do not fill {blocks} blocks of {layout.block_tokens}"
        violations.append(FieldViolation("handoff.num_tokens", text))
    elif not _continues(handoff, prompt):
        text = f"prompt and emitted do not continue {handoff.num_tokens} tokens with the first token"
        violations.append(FieldViolation("handoff.num_tokens", text))
    if handoff.num_bytes != blocks * layout.block_bytes:
        text = f"{handoff.num_bytes} is not {blocks} blocks of {layout.block_bytes}"
        violations.append(FieldViolation("handoff.num_bytes", text))
    if violations:
        raise InvalidRequest(violations)


def check_state(handoff: Handoff, prompt: Prompt, layout: KvLayout) -> None:
    """Checks a handoff whose KV the engine fetches by the handoff's engine state. Raises as `check_handoff` does."""
    _check_layout(handoff, layout)
    _check_lora(handoff, prompt)
    violations = []
    if not handoff.engine_state:
        violations.append(FieldViolation("handoff.engine_state", "is empty; this engine fetches KV by it"))
    if not _continues(handoff, prompt):
        text = f"prompt and emitted do not continue {handoff.num_tokens} tokens with the first token"
        violations.append(FieldViolation("handoff.num_tokens", text))
    if violations:
        raise InvalidRequest(violations)


def _check_layout(handoff: Handoff, layout: KvLayout) -> None:
    if handoff.layout_digest != layout.digest:
        raise LayoutMismatch(
            f"the handoff of worker {handoff.worker_id} has KV layout {handoff.layout_digest}, "
            f"the blocks here have {layout.digest}"
        )


def _check_lora(handoff: Handoff, prompt: Prompt) -> None:
    digest = prompt.lora.digest if prompt.lora else ""
    if handoff.lora_digest != digest:
        raise LoraMismatch(
            f"the KV of worker {handoff.worker_id} was computed with {_adapter(handoff.lora_digest)}, "
            f"and the request is for {_adapter(digest)}"
        )


def _adapter(digest: str) -> str:
    return f"an adapter of content {digest[:12]}" if digest else "no adapter"


def check_blocks(leased: LeasedBlocks, num_blocks: int, path: str = "handoff") -> None:
    """Raises InvalidRequest naming each block id, below `path`, that is repeated or not in a pool of this size."""
    if _are_distinct(leased.block_ids, num_blocks):
        return
    seen: set[int] = set()
    violations = []
    for index, block_id in enumerate(leased.block_ids):
        if block_id >= num_blocks or block_id in seen:
            text = f"{block_id} is given twice" if block_id in seen else f"{block_id} is not within {num_blocks} blocks"
            violations.append(FieldViolation(f"{path}.block_ids[{index}]", text))
        seen.add(block_id)
    if violations:
        raise InvalidRequest(violations)


def _are_distinct(block_ids: Sequence[int], num_blocks: int) -> bool:
    """True if each id is within so many blocks, and comes once."""
    ids = np.frombuffer(packed_ids(block_ids), np.uint32)
    if len(ids) and ids.max() >= num_blocks:
        return False
    seen = np.zeros(num_blocks, np.bool_)
    seen[ids] = True
    return int(np.count_nonzero(seen)) == len(ids)


def _continues(handoff: Handoff, prompt: Prompt) -> bool:
    context = prompt.context
    return (
        len(prompt.token_ids) <= handoff.num_tokens < len(context)
        and context[handoff.num_tokens] == handoff.first_token
    )
