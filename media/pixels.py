"""From the content of a checked image to its pixels, as models see it."""

from io import BytesIO

from PIL import Image, ImageOps

from media.image import BROKEN, FORMATS
from rpc.errors import InvalidRequest


def read_pixels(content: bytes, field: str) -> Image.Image:
    """The image in RGB, turned as its EXIF says. Blocking. Raises InvalidRequest naming `field` if it is damaged."""
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidRequest.of(field, "has too many pixels") from None
    except BROKEN:
        raise InvalidRequest.of(field, "is truncated or damaged") from None
