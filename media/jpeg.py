"""JPEGs that cost too much: their size in bytes and in pixels bounds nothing.

A progressive JPEG may have any number of scans, 65 bytes each, and each is a pass over all pixels: 50 ms at 40 million.
Bytes between the segments of its header are read one by one.
"""

import re

# Encoders write about 10 scans, and 25 when they are pressed for space.
_MAX_SCANS = 64
_MAX_PADDING = 64 * 1024

_START = b"\xff\xd8"
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_SCAN, _END = 0xDA, 0xD9
_STANDALONE = frozenset(range(0xD0, 0xD9))  # restarts and the start of the image: markers without a length


def is_laborious(content: bytes) -> bool:
    """Whether decoding would take far longer than for any picture of its size. False for what is no JPEG."""
    if not content.startswith(_START):
        return False
    scans = padding = position = 0
    while (match := _MARKER.search(content, position)) is not None:
        # Between a scan's marker and the next there are its pixels, and no padding.
        padding += match.start() - position if not scans else 0
        kind, position = content[match.end() - 1], match.end()
        scans += kind == _SCAN
        if scans > _MAX_SCANS or padding > _MAX_PADDING:
            return True
        if kind == _END:
            break
        if kind not in _STANDALONE:
            position += int.from_bytes(content[position : position + 2], "big")
    return False
