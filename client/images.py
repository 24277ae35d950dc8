"""Images as callers have them, and as requests carry them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from baton.inference.v1 import generate_pb2, media_pb2

from rpc.errors import InvalidRequest

# A file's content, the path of a file here, or a URI that the router is to fetch.
Image: TypeAlias = bytes | Path | str


def user_message(text: str, images: Sequence[Image]) -> generate_pb2.ChatMessage:
    """What a user says about some images. Raises InvalidRequest if a file cannot be read."""
    parts = [generate_pb2.ContentPart(media=media_item(image)) for image in images]
    return generate_pb2.ChatMessage(role="user", parts=[*parts, generate_pb2.ContentPart(text=text)])


def media_item(image: Image) -> media_pb2.MediaItem:
    """The image; its type is what its content says. Raises InvalidRequest if a file cannot be read."""
    match image:
        case bytes():
            return media_pb2.MediaItem(data=image)
        case Path():
            return media_pb2.MediaItem(data=_read(image))
        case uri:
            return media_pb2.MediaItem(uri=uri)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest.of(f"image {path}", f"cannot be read: {error.strerror}") from None
