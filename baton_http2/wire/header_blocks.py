"""Header blocks as they come in frames: put together from HEADERS and CONTINUATION, bounded, and decoded."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_http2.limits import Http2Limits, exceeded
from baton_http2.wire import frames as h2
from baton_http2.wire.frames import ConnectionFailure
from baton_http2.wire.hpack import HOPELESS, Field, HeaderListTooLarge, HpackDecoder


@dataclass(slots=True)  # not frozen: each call has one, and freezing takes a call for each field
class HeaderBlock:
    """A whole block. `fields` is None for a list over the limit, which is about `times` as long as that."""

    stream_id: int
    is_last: bool
    fields: Sequence[Field] | None
    times: int


class HeaderBlocks:
    """The header blocks of one connection."""

    def __init__(self, limits: Http2Limits) -> None:
        self._decoder = HpackDecoder(limits.max_header_list_bytes)
        self._max_list_bytes = limits.max_header_list_bytes
        # Up to here a list that is too long is only a call's fault, and others on the connection go on.
        self._max_block_bytes = HOPELESS * limits.max_header_list_bytes
        self._max_continuations = limits.max_continuations
        self._continuations = 0
        self.has_begun = False  # whether CONTINUATION has to come
        self._begun = bytearray()
        self._stream_id = 0
        self._is_last = False

    def check(self, kind: int, stream_id: int) -> None:
        """Raises ConnectionFailure for a frame that must not be within a block."""
        if kind != h2.CONTINUATION or stream_id != self._stream_id:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "a header block is interrupted")

    def begin(self, flags: int, stream_id: int, payload: bytes) -> HeaderBlock | None:
        """HEADERS: the block, if it is in this frame as a whole. Raises ConnectionFailure."""
        if not stream_id & 1:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "HEADERS is not on a client's stream")
        if flags & h2.PADDED:
            payload = h2.unpadded(payload)
        if flags & h2.PRIORITIZED:
            payload = _without_priority(stream_id, payload)
        self._stream_id, self._is_last = stream_id, bool(flags & h2.END_STREAM)
        if flags & h2.END_HEADERS:
            return self._decode(payload)
        self._begun, self._continuations, self.has_begun = bytearray(payload), 0, True
        return None

    def go_on(self, flags: int, payload: bytes) -> HeaderBlock | None:
        """CONTINUATION: the block, if it ends here. Raises ConnectionFailure."""
        if not self.has_begun:
            raise ConnectionFailure(h2.PROTOCOL_ERROR, "CONTINUATION continues nothing")
        self._continuations += 1
        if self._continuations > self._max_continuations:
            raise exceeded("continuations", "too many CONTINUATION frames")
        self._begun += payload
        if len(self._begun) > self._max_block_bytes:
            raise exceeded("header_lists", "a header block is too large")
        if not flags & h2.END_HEADERS:
            return None
        block, self._begun, self.has_begun = bytes(self._begun), bytearray(), False
        return self._decode(block)

    def _decode(self, block: bytes) -> HeaderBlock:
        fields: Sequence[Field] | None
        try:
            fields = self._decoder.decode(block)
        except HeaderListTooLarge:
            fields = None
        return HeaderBlock(self._stream_id, self._is_last, fields, 1 + len(block) // self._max_list_bytes)


def _without_priority(stream_id: int, payload: bytes) -> bytes:
    if len(payload) < 5:
        raise ConnectionFailure(h2.FRAME_SIZE_ERROR, "HEADERS has no room for its priority")
    if h2.U32.unpack_from(payload)[0] & h2.MAX_STREAM_ID == stream_id:
        raise ConnectionFailure(h2.PROTOCOL_ERROR, "a stream depends on itself")
    return payload[5:]
