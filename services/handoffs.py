"""What passes between the two sides of a handoff, as values."""

from dataclasses import dataclass, field

from baton.inference.v1 import timing_pb2

from rpc.errors import FieldViolation, InvalidRequest, LayoutMismatch
from services.kv import KvLayout
from services.prompt import Prompt


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """A lease on blocks of another worker's pool, as it came off the wire: nothing in it is to be trusted unchecked."""

    handoff_id: str = field(repr=False)
    worker_id: str
    epoch: int
    address: str
    lease_seconds: float
    layout_digest: str
    num_bytes: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Handoff(LeasedBlocks):
    """A lease on KV, and the token that was sampled from it."""

    num_tokens: int
    first_token: int
    engine_state: bytes = field(default=b"", repr=False)  # of an engine that moves KV itself


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a stage took here, and for transfers what was moved, and how."""

    stage: "timing_pb2.Stage.ValueType"
    seconds: float
    num_bytes: int = 0
    transport: str = ""


def check_handoff(handoff: Handoff, prompt: Prompt, layout: KvLayout) -> None:
    """Raises LayoutMismatch, or InvalidRequest naming every field that contradicts the prompt or another field."""
    _check_layout(handoff, layout)
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
    """The same, of a handoff whose KV an engine moves by its own state."""
    _check_layout(handoff, layout)
    violations = []
    if not handoff.engine_state:
        violations.append(FieldViolation("handoff.engine_state", "is empty; the engine here fetches KV by it"))
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


def check_blocks(leased: LeasedBlocks, num_blocks: int, path: str = "handoff") -> None:
    """Raises InvalidRequest naming each id, below `path`, that is no block of a pool of this size, or comes twice."""
    seen: set[int] = set()
    violations = []
    for index, block_id in enumerate(leased.block_ids):
        if block_id >= num_blocks or block_id in seen:
            text = f"{block_id} comes twice" if block_id in seen else f"{block_id} is not within {num_blocks} blocks"
            violations.append(FieldViolation(f"{path}.block_ids[{index}]", text))
        seen.add(block_id)
    if violations:
        raise InvalidRequest(violations)


def _continues(handoff: Handoff, prompt: Prompt) -> bool:
    context = prompt.context
    return (
        len(prompt.token_ids) <= handoff.num_tokens < len(context)
        and context[handoff.num_tokens] == handoff.first_token
    )
