"""Kept decodes in the journal: what a slot has of each beside its ids, and what the next process makes of it."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct

from baton.engine.v1 import decode_pb2, prompt_pb2
from baton.errors import EmbeddingLost
from services.engines.journal.journal import Journal, RecoveredDecode
from services.engines.journal.slots import Slot
from services.engines.kv import Reservation
from services.resume.stream import KeptStream

# The deadline by the host's monotonic clock, and the number of the prompt's ids.
_PREFIX = Struct("<dI")


@dataclass(frozen=True, slots=True)
class LeftStream:
    """A kept decode that the worker's last process has left. `request` has its ids so far as `emitted`."""

    request: decode_pb2.DecodeRequest
    deadline_at: float | None
    decode: RecoveredDecode

    @classmethod
    def read(cls, decode: RecoveredDecode) -> "LeftStream":
        """Of a journaled decode: its record is as it was written, by the same version."""
        deadline_at, prompt_tokens = _PREFIX.unpack_from(decode.record)
        request = decode_pb2.DecodeRequest.FromString(decode.record[_PREFIX.size :])
        request.prompt.token_ids.extend(decode.ids[:prompt_tokens])
        request.emitted.extend(decode.ids[prompt_tokens:])
        return cls(request, None if math.isinf(deadline_at) else deadline_at, decode)

    @property
    def remaining_seconds(self) -> float | None:
        """The time until its deadline; None without one."""
        return None if self.deadline_at is None else max(0.0, self.deadline_at - asyncio.get_running_loop().time())

    def reservation(self) -> Reservation | None:
        """The blocks that it goes on with; None if it has none: its prompt is computed again.

        Raises EmbeddingLost if that cannot be.
        """
        # Before the first token the prefix cache has what is of use.
        found = self.decode.reservation if self.request.emitted else None
        if found is None and self.request.prompt.media:
            raise EmbeddingLost("the embeddings of the prompt's media were lost with the worker's last process")
        return found


async def release(decode: RecoveredDecode) -> None:
    """Frees the blocks that no generation has taken over."""
    decode.slot.revoke()
    if decode.reservation is not None:
        await decode.reservation.release()


def no_slot() -> Slot | None:
    """That of a decode which ends with its process."""
    return None


def open_slot(journal: Journal, stream: KeptStream, make_room: Callable[[], bool]) -> Slot | None:
    """A slot for a stream that begins; None if there is no room for it, or if it cannot be taken over.

    `make_room` frees a slot that another stream needs less, if there is one.
    """
    if stream.logprobs is not None and stream.logprobs.of_prompt:
        return None  # all of its prompt would have to be computed again
    prompt = prompt_pb2.Prompt.FromString(stream.kept.prompt)
    ids = [*prompt.token_ids, *stream.ids]
    record = _record(stream, prompt)
    slot = journal.open_slot(record, ids)
    while slot is None and not journal.has_room and make_room():
        slot = journal.open_slot(record, ids)
    return slot


def _record(stream: KeptStream, prompt: prompt_pb2.Prompt) -> bytes:
    """The request of a stream without its ids, which the journal has."""
    kept, prompt_tokens = stream.kept, len(prompt.token_ids)
    prompt.ClearField("token_ids")
    request = kept.read()
    request.request_id = kept.request_id
    request.prompt.CopyFrom(prompt)
    deadline_at = math.inf if stream.deadline_at is None else stream.deadline_at
    return _PREFIX.pack(deadline_at, prompt_tokens) + request.SerializeToString()
