"""Attempts to attach to a kept decode, which the journal of its worker notes."""

import mmap

import pytest
from support.clients.worker_calls import decode_request

from baton.engine.v1 import decode_pb2
from baton.errors import StaleAttempt
from services.engines.journal.slots import Slot, SlotShape
from services.resume.attaching import require_later
from services.resume.stream import KeptRequest, KeptStream

_SHAPE = SlotShape(tokens=64, blocks=4)
_LAST = 2**32 - 1


def test_after_the_last_attempt_that_can_be_counted_come_those_that_count_none() -> None:
    request = decode_request(request_id="a", max_tokens=4)
    request.keep.grace.FromSeconds(1)
    stream, slot = KeptStream(KeptRequest.of(request, 60.0), 0), Slot(mmap.mmap(-1, _SHAPE.num_bytes), _SHAPE, 0)
    for attachment, attempt in enumerate((_LAST, 0, 0), start=1):
        require_later(stream, decode_pb2.AttachRequest(attempt=attempt))
        slot.note(stream.attempt, attachment)
        assert slot.last_reader == (_LAST, attachment)
    with pytest.raises(StaleAttempt):
        require_later(stream, decode_pb2.AttachRequest(attempt=_LAST))
