"""Generates pictures for tests, valid and invalid ones."""

import random
import struct
import zlib
from io import BytesIO

from PIL import Image


def picture(kind: str = "PNG", *, width: int = 32, height: int = 24, mode: str = "RGB", **options: object) -> bytes:
    """A picture of coloured noise, the same each time, as a file of Pillow's format `kind`."""
    file = BytesIO()
    _noise(width, height, mode).save(file, kind, **options)
    return file.getvalue()


def animation(kind: str) -> bytes:
    """A file of two differing frames."""
    file = BytesIO()
    second = _noise(32, 24, "RGB").rotate(180)
    _noise(32, 24, "RGB").save(file, kind, save_all=True, append_images=[second], duration=100)
    return file.getvalue()


def vast_png(side: int) -> bytes:
    """A whole and valid PNG of `side` x `side` black pixels, one bit each."""
    lines = zlib.compress(bytes((1 + -(-side // 8)) * side), 1)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def png_with(*chunks: bytes) -> bytes:
    """A small PNG with further chunks behind its header."""
    whole = picture("PNG")
    end_of_header = 8 + 25
    return whole[:end_of_header] + b"".join(chunks) + whole[end_of_header:]


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def many_scans(scans: int) -> bytes:
    """A progressive JPEG that repeats its last scan, which changes nothing."""
    file = BytesIO()
    Image.new("L", (64, 64), 128).save(file, "JPEG", progressive=True)
    whole, end = file.getvalue()[:-2], b"\xff\xd9"
    return whole + whole[whole.rindex(b"\xff\xda") :] * scans + end


def _noise(width: int, height: int, mode: str) -> Image.Image:
    pixels = random.Random(0).randbytes(width * height * 3)
    return Image.frombytes("RGB", (width, height), pixels).convert(mode)
