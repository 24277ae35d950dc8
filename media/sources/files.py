"""Reading and writing `file:` URIs below allowed folders, and nothing else.

A path is resolved first and then opened folder by folder without following links, so that a link put in its way
between the two is refused and not followed.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import PurePosixPath
from urllib.parse import unquote_to_bytes

from baton.errors import InvalidRequest, MediaUnavailable, PermissionDenied
from media.sources import uri

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_REDIRECTED = frozenset({errno.ELOOP, errno.ENOTDIR})


def read(address: str, field: str, *, folders: Sequence[str], max_bytes: int) -> bytes:
    """The content of a regular file below one of `folders`. Blocking. Links within a folder are followed.

    Raises PermissionDenied for any path outside, whether it exists or not; InvalidRequest if there is no such
    file, or it is not a file, or it is too large; MediaUnavailable if the disk fails.
    """
    folder, parts = _beneath(_path(address, field), field, folders)
    try:
        with ExitStack() as opened:
            return _read(_open(folder, parts, field, opened), field, max_bytes)
    except FileNotFoundError:
        raise InvalidRequest.of(field, "the file does not exist") from None
    except PermissionError:
        raise PermissionDenied(f"{field}: the file may not be read") from None
    except OSError as error:
        if error.errno in _REDIRECTED:
            raise _outside(field) from None
        raise MediaUnavailable(f"{field}: the file cannot be read") from None


def check_folder(address: str, field: str, *, folders: Sequence[str]) -> None:
    """Raises what `write` would, unless the folder is there. Blocking."""
    with _opened_folder(address, field, folders):
        pass


def write(address: str, field: str, *, folders: Sequence[str], name: str, content: bytes) -> str:
    """Writes a file into the folder of this address, below one of `folders`, and returns its URI. Blocking.

    Raises PermissionDenied for any path outside, InvalidRequest if there is no such folder, and MediaUnavailable if the
    disk fails.
    """
    with _opened_folder(address, field, folders) as (path, descriptor):
        made = os.open(name, _NEW_FILE, 0o644, dir_fd=descriptor)
        with open(made, "wb") as file:
            file.write(content)
    return (path / name).as_uri()


@contextmanager
def _opened_folder(address: str, field: str, folders: Sequence[str]) -> Iterator[tuple[PurePosixPath, int]]:
    """The real folder, and a descriptor of it, for as long as the context lasts."""
    folder, parts = _beneath(_path(address, field), field, folders)
    try:
        with ExitStack() as opened:
            descriptor = _closed_by(opened, os.open(folder, _FOLDER))
            for part in parts:
                descriptor = _closed_by(opened, os.open(part, _FOLDER, dir_fd=descriptor))
            yield PurePosixPath(folder, *parts), descriptor
    except FileNotFoundError:
        raise InvalidRequest.of(field, "the folder does not exist") from None
    except PermissionError:
        raise PermissionDenied(f"{field}: the folder may not be written") from None
    except OSError as error:
        if error.errno in _REDIRECTED:
            raise InvalidRequest.of(field, "is not a folder") from None
        raise MediaUnavailable(f"{field}: the file cannot be written") from None


def _path(address: str, field: str) -> PurePosixPath:
    parts = uri.split(address, field)
    if parts.netloc.lower() not in ("", "localhost"):
        raise InvalidRequest.of(field, "names a host; expected file:///path")
    if parts.query or parts.fragment:
        raise InvalidRequest.of(field, "has a query or a fragment; escape '?' and '#' in a file's name")
    path = unquote_to_bytes(parts.path)
    if not path.startswith(b"/") or b"\0" in path:
        raise InvalidRequest.of(field, "has no absolute path; expected file:///path")
    return PurePosixPath(os.fsdecode(path))


def _beneath(path: PurePosixPath, field: str, folders: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The real folder, and the names on the path from it to the real file, none of which was a link when checked."""
    # First as a string, so that nothing outside the folders is even accessed.
    folder = next((folder for folder in folders if path.is_relative_to(folder)), None)
    if folder is None or ".." in path.parts:
        raise _outside(field)
    real_folder, real_path = os.path.realpath(folder), os.path.realpath(path)
    try:
        return real_folder, PurePosixPath(real_path).relative_to(real_folder).parts
    except ValueError:
        raise _outside(field) from None


def _open(folder: str, parts: Sequence[str], field: str, opened: ExitStack) -> int:
    descriptor = _closed_by(opened, os.open(folder, _FOLDER))
    if not parts:
        raise _not_a_file(field)
    *inner, name = parts
    for part in inner:
        descriptor = _closed_by(opened, os.open(part, _FOLDER, dir_fd=descriptor))
    # Before opening, because opening a device may have effects, and after, because the file may have been replaced.
    if not stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
        raise _not_a_file(field)
    return _closed_by(opened, os.open(name, _FILE, dir_fd=descriptor))


def _read(descriptor: int, field: str, max_bytes: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _not_a_file(field)
    with open(descriptor, "rb", closefd=False) as file:
        # One byte more than allowed: the file may have grown, or report a size of 0, like files in /proc.
        content = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
    if max(status.st_size, len(content)) > max_bytes:
        raise InvalidRequest.of(field, f"is larger than the limit of {max_bytes} bytes")
    return content


def _closed_by(opened: ExitStack, descriptor: int) -> int:
    opened.callback(os.close, descriptor)
    return descriptor


def _outside(field: str) -> PermissionDenied:
    return PermissionDenied(f"{field}: the file is not in an allowed folder")


def _not_a_file(field: str) -> InvalidRequest:
    return InvalidRequest.of(field, "is not a regular file")
