"""The type of a media item by its bytes, before an image library reads them."""

import re

# A progressive JPEG may have any number of scans, 65 bytes each, and each is a pass over all pixels: 50 ms at 40
# million. Bytes between the segments of its header are read one by one. Its size bounds neither.
# Encoders write about 10 scans, and 25 for the smallest files.
_MAX_SCANS = 64
_MAX_PADDING = 64 * 1024

_START = b"\xff\xd8"
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_SCAN, _END = 0xDA, 0xD9
_STANDALONE = frozenset(range(0xD0, 0xD9))  # restarts and the start of the image: markers without a length

_OURS = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP", re.DOTALL)
# Each alternative consumes input that no other can, so that matching takes time linear in the content, also when it
# fails: a comment ends at the first `-->` and nowhere else.
_COMMENTS = rb"(?:<!--(?:(?!-->).)*-->\s*)*"
_SVG = rb"\s*(?:<\?xml[^>]*>\s*)?" + _COMMENTS + rb"(?:<!DOCTYPE svg[^>]*>\s*" + _COMMENTS + rb")?<svg\b"
_OTHERS = (
    ("SVG", re.compile(_SVG, re.DOTALL)),
    ("HTML", re.compile(rb"\s*<(!doctype html|html|head|body)\b", re.IGNORECASE)),
    ("XML", re.compile(rb"\s*<\?xml\b")),
    ("a ZIP archive", re.compile(rb"PK(\x03\x04|\x05\x06)")),
    ("a gzip archive", re.compile(rb"\x1f\x8b")),
    ("PDF", re.compile(rb"%PDF-")),
    ("BMP", re.compile(rb"BM....\0\0\0\0", re.DOTALL)),
    ("TIFF", re.compile(rb"II\*\0|MM\0\*")),
    ("AVIF or HEIF", re.compile(rb"....ftyp(avi[fs]|mif1|msf1|hei[cx]|hev[cx])", re.DOTALL)),
    ("MP4", re.compile(rb"....ftyp", re.DOTALL)),
    ("JPEG 2000", re.compile(rb"\0\0\0\x0cjP")),
    ("text", re.compile(rb"[\t\n\r\x20-\x7e]{16}")),
)
_LOOKED_AT = 1024


def is_known_image(content: bytes) -> bool:
    """True if it starts like one of the image types that Baton can read."""
    return _OURS.match(content) is not None


def describe(content: bytes) -> str:
    """The name of another type that could be mistaken for an image, such as `SVG`; empty if none is recognized."""
    start = content[:_LOOKED_AT]
    return next((name for name, pattern in _OTHERS if pattern.match(start)), "")


def is_laborious(content: bytes) -> bool:
    """True if a JPEG would take far longer to decode than others of its size. False for other types."""
    if not content.startswith(_START):
        return False
    scans = padding = position = 0
    while (match := _MARKER.search(content, position)) is not None:
        # After a scan's marker come its pixels, not padding.
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
