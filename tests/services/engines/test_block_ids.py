"""Block ids as C integers: packed once, and the same numbers as before."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from baton.engine.v1 import handoff_pb2
from services.engines.kv import packed_ids
from services.handoff.remote_handoff import read_handoff

LARGEST = 2**32 - 1


@pytest.mark.parametrize("ids", [(), (7,), [3, 0, LARGEST], range(5), (2,) * 40_000])
def test_packed_ids_are_the_same_numbers_of_32_bits(ids: Sequence[int]) -> None:
    packed = packed_ids(ids)
    assert list(packed) == list(ids)
    assert np.frombuffer(packed, np.uint32).tolist() == list(ids)


def test_packed_ids_are_not_packed_again() -> None:
    packed = packed_ids((4, 5, 6))
    assert packed_ids(packed) is packed
    assert packed_ids(packed[1:]) == array("I", (5, 6))


def test_a_handoffs_ids_are_packed_when_it_is_read() -> None:
    handoff = read_handoff(handoff_pb2.KvHandoff(handoff_id="h", address="a:1", block_ids=[9, 2, LARGEST]))
    assert packed_ids(handoff.block_ids) is handoff.block_ids
    assert list(handoff.block_ids) == [9, 2, LARGEST]
