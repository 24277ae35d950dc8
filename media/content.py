"""The type of a media item by its bytes, before an image library reads them. MIME types as clients write them.

A media item of a request, and the checked content of one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest, Unsupported


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One media item of a request, not yet checked.

    `path` is its path in the request, such as `media[0]`; errors name the fields below it. `source` is the content, or
    its URI. `mime_type` is the type that the client declared; empty if it declared none.
    """

    path: str
    source: bytes | str
    mime_type: str = ""

    @property
    def source_field(self) -> str:
        """The field for errors about the content: `media[0].data` or `media[0].uri`."""
        return f"{self.path}.uri" if isinstance(self.source, str) else f"{self.path}.data"

    @property
    def mime_type_field(self) -> str:
        """The field for errors about the declared type."""
        return f"{self.path}.mime_type"


@dataclass(frozen=True, slots=True)
class CheckedMedia:
    """An image that is complete, of an accepted type and within the limits.

    `content` is the file as received, not decoded; `mime_type` is its actual type. Width and height are in pixels, as
    stored: an orientation in its EXIF is not applied. `digest` is the SHA-256 of the content, 32 bytes.
    """

    content: bytes
    mime_type: str
    width: int
    height: int
    digest: bytes


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


_ALIASES = {"image/jpg": "image/jpeg"}


def normal_type(mime_type: str) -> str:
    """The type in lower case, without parameters, by its registered name."""
    bare = mime_type.partition(";")[0].strip().lower()
    return _ALIASES.get(bare, bare)


def check_declared(item: MediaItem, allowed: Sequence[str]) -> None:
    """Raises Unsupported if the item declares a type that is not accepted."""
    if item.mime_type and normal_type(item.mime_type) not in allowed:
        raise Unsupported(f"{item.mime_type_field}: {item.mime_type[:80]!r} is not accepted; {accepted_types(allowed)}")


def agreed_type(item: MediaItem, uri_type: str) -> str:
    """The type that an item and its URI declare. Raises InvalidRequest if they differ."""
    if item.mime_type and uri_type and normal_type(item.mime_type) != normal_type(uri_type):
        raise InvalidRequest.of(item.mime_type_field, "differs from the type that the data: URI gives")
    return item.mime_type or uri_type


def accepted_types(allowed: Sequence[str]) -> str:
    """The accepted types, for the end of a message."""
    return f"accepted are {', '.join(allowed)}"
