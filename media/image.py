"""Checks that an image has its declared type, is complete, and is within the limits; and reads its pixels."""

import hashlib
import struct
import zlib
from io import BytesIO

from PIL import Image, ImageOps

from baton.errors import BatonError, InvalidRequest, Unsupported
from media.config import MediaConfig
from media.content import (
    CheckedMedia,
    MediaItem,
    accepted_types,
    check_declared,
    describe,
    is_known_image,
    is_laborious,
    normal_type,
)

# MPO is a JPEG with further pictures inside, such as a depth map; only the first one is used.
_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "MPO": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

# The errors that Pillow's readers raise for damaged files.
BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    ArithmeticError,
    struct.error,
    zlib.error,
)


def check_image(item: MediaItem, content: bytes, config: MediaConfig) -> CheckedMedia:
    """The image in `content`, which has come from the item's source. Blocking; decodes all pixels and drops them.

    An item without a MIME type gets the one that its content has. Orientation is not applied. Raises InvalidRequest
    for content that is empty, damaged, too large, animated, or not of the declared type; Unsupported for types that are
    not accepted. Sizes are checked before anything is decoded.
    """
    check_declared(item, config.allowed_types)
    if not content:
        raise InvalidRequest.of(item.source_field, "is empty")
    if len(content) > config.max_bytes:
        raise InvalidRequest.of(item.source_field, f"is larger than the limit of {config.max_bytes} bytes")
    if not is_known_image(content):
        raise _no_image(item, content, config)
    if is_laborious(content):
        raise InvalidRequest.of(item.source_field, "has too many scans or too much padding")
    return _decoded(item, content, config)


def _decoded(item: MediaItem, content: bytes, config: MediaConfig) -> CheckedMedia:
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            mime_type = _TYPES[image.format or ""]
            _check_type(item, mime_type, config)
            _check_size(item, image.width, image.height, config)
            if image.format != "MPO" and getattr(image, "is_animated", False):
                raise InvalidRequest.of(item.source_field, "has more than one frame; only still images are accepted")
            image.load()
            return CheckedMedia(content, mime_type, image.width, image.height, hashlib.sha256(content).digest())
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(item, config) from None
    except BROKEN:
        raise InvalidRequest.of(item.source_field, "is truncated or damaged") from None


def _check_type(item: MediaItem, mime_type: str, config: MediaConfig) -> None:
    if item.mime_type and normal_type(item.mime_type) != mime_type:
        declared = normal_type(item.mime_type)
        raise InvalidRequest.of(item.mime_type_field, f"is {declared}, but the content is {mime_type}")
    if mime_type not in config.allowed_types:
        raise Unsupported(f"{item.source_field}: {mime_type} is not accepted; {accepted_types(config.allowed_types)}")


def _check_size(item: MediaItem, width: int, height: int, config: MediaConfig) -> None:
    if width * height > config.max_pixels:
        raise _too_many_pixels(item, config)
    if max(width, height) > config.max_aspect_ratio * min(width, height):
        raise InvalidRequest.of(
            item.source_field, f"has sides of {width} and {height} pixels: over 1 to {config.max_aspect_ratio:g}"
        )


def _too_many_pixels(item: MediaItem, config: MediaConfig) -> InvalidRequest:
    return InvalidRequest.of(item.source_field, f"has more pixels than the limit of {config.max_pixels}")


def _no_image(item: MediaItem, content: bytes, config: MediaConfig) -> BatonError:
    found = describe(content)
    if item.mime_type:
        said = normal_type(item.mime_type)
        return InvalidRequest.of(item.mime_type_field, f"is {said}, but the content is {found or 'something else'}")
    if found:
        return Unsupported(f"{item.source_field}: {found} is not accepted; {accepted_types(config.allowed_types)}")
    return InvalidRequest.of(item.source_field, f"is not an image; {accepted_types(config.allowed_types)}")


def read_pixels(content: bytes, field: str) -> Image.Image:
    """The image in RGB, with its EXIF orientation applied. Blocking. Raises InvalidRequest if it is damaged."""
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidRequest.of(field, "has too many pixels") from None
    except BROKEN:
        raise InvalidRequest.of(field, "is truncated or damaged") from None
