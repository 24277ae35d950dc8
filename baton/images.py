"""From images to the messages of a request."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from baton.errors import InvalidRequest
from baton.files import LARGEST_REQUEST_BYTES, read_file
from baton.inference.v1 import generate_pb2, media_pb2

# A file's content, the path of a file here, or a URI for the router to fetch.
Image: TypeAlias = bytes | Path | str


def user_message(text: str, images: Sequence[Image]) -> generate_pb2.ChatMessage:
    """A user's message about some images. Raises InvalidRequest if a file cannot be read."""
    parts = [generate_pb2.ContentPart(media=media_item(image)) for image in images]
    return generate_pb2.ChatMessage(role="user", parts=[*parts, generate_pb2.ContentPart(text=text)])


def media_item(image: Image) -> media_pb2.MediaItem:
    """The image; the router reads its type from its content. Raises InvalidRequest if a file cannot be read."""
    match image:
        case bytes():
            return media_pb2.MediaItem(data=image)
        case Path():
            return media_pb2.MediaItem(data=_read(image))
        case uri:
            return media_pb2.MediaItem(uri=uri)


def _read(path: Path) -> bytes:
    try:
        return read_file(path, LARGEST_REQUEST_BYTES)
    except OSError as error:
        raise InvalidRequest.of(f"image {path}", f"cannot be read: {error.strerror}") from None
