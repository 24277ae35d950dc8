"""The event loop's time for the bytes of a large message, as they come."""

import time

from support.calibration import here

from baton_http2.stream import RECEIVE_WINDOW
from baton_http2.wire.frames import PREFIX
from baton_http2.wire.messages import Inbox

MIB = 2**20
SIZE = 63 * MIB
FRAME = bytes(16 * 1024)


def gap_in_the_heap(size: int) -> bytes:
    """Leaves a gap between what lives; the caller keeps its end."""
    pieces = [bytes(100_000) for _ in range(size // 100_000)]
    end = bytes(100_000)
    pieces.clear()
    return end


def longest_piece() -> float:
    """CPU seconds of the piece that took longest."""
    inbox, longest = Inbox(SIZE), 0.0
    inbox.feed(PREFIX.pack(0, SIZE))
    for _ in range(0, SIZE, len(FRAME)):
        began = time.thread_time()
        inbox.feed(FRAME)
        if inbox.partial_size > RECEIVE_WINDOW // 2:
            inbox.make_room()
        longest = max(longest, time.thread_time() - began)
    assert inbox.count == 1
    return longest


def test_no_piece_of_a_large_message_moves_those_before_it() -> None:
    ends = [gap_in_the_heap(size * MIB) for size in (20, 30)]
    # As a page fault of each of four pages, and a copy of half a window; a copy of 20 MiB takes ten times as long.
    assert min(longest_piece() for _ in range(4)) < here(0.002)
    assert len(ends) == 2
