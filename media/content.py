"""What content is that is not an acceptable image, as far as its first bytes tell."""

import re

_OURS = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP", re.DOTALL)
_OTHERS = (
    ("SVG", re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!DOCTYPE svg[^>]*>\s*)?<svg\b", re.DOTALL)),
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
    """Whether it starts as one of the image types that Baton can read, whatever comes after."""
    return _OURS.match(content) is not None


def describe(content: bytes) -> str:
    """A name for something else, such as `SVG`; empty if it is nothing that people take for an image."""
    start = content[:_LOOKED_AT]
    return next((name for name, pattern in _OTHERS if pattern.match(start)), "")
