"""Reads files that a user names: no device, and no more than a limit. Images become the messages of a request."""

import errno
import os
import stat
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, media_pb2

LARGEST_REQUEST_BYTES = 64 * 1024 * 1024
"""No router accepts a larger message."""
# A file's content, the path of a file here, or a URI for the router to fetch.
Image: TypeAlias = bytes | Path | str


def read_file(path: str | PathLike[str], most_bytes: int) -> bytes:
    """Returns the content of a file, or of a pipe such as a shell's `<(...)`.

    Raises OSError for a device or a folder, and if it has more than `most_bytes`.
    """
    # Not blocking, since opening a pipe that nothing writes to would wait for a writer.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a zero byte
        raise OSError(errno.EINVAL, "is not a valid file path") from None
    with open(descriptor, "rb") as file:
        kind = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            raise OSError(errno.EINVAL, "is neither a file nor a pipe", os.fspath(path))
        os.set_blocking(descriptor, True)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", os.fspath(path))
    return content


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
