"""Reads files that a user names: no device, and no more than a limit."""

import errno
import os
import stat
from os import PathLike

LARGEST_REQUEST_BYTES = 64 * 1024 * 1024
"""No router accepts a larger message."""


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
