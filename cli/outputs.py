"""The files that a command writes at its end: refused at its start if they cannot be written."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from baton.errors import ConfigError


def require_writable(files: Mapping[str, str | None]) -> None:
    """Raises ConfigError naming the first option whose file cannot be written, or is that of another option too.

    Files keep their content, and those that were missing are missing afterwards: the command may yet fail.
    """
    seen: dict[Path, str] = {}
    for option, name in files.items():
        if name is None:
            continue
        path = Path(name)
        with explained(option, name):
            if path.exists() and not path.is_file() and not path.is_dir():
                continue  # such as /dev/stdout, which several may share, and a pipe, which would block
            _write_nothing(path)
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise ConfigError(f"{option}: {name} is the file of {other} too")


def _write_nothing(path: Path) -> None:
    """Writes a byte, since a full disk takes empty files, and removes it."""
    is_new = not path.exists()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            file.write(b"\n")
        finally:
            file.truncate(size)
            if is_new:
                path.unlink()


def write_text(option: str, name: str, text: str) -> None:
    """Writes a file. Raises ConfigError naming the option."""
    with explained(option, name):
        Path(name).write_text(text)


@contextmanager
def explained(option: str, name: str) -> Iterator[None]:
    """Raises ConfigError naming the option, where its file cannot be written."""
    try:
        yield
    except (OSError, ValueError) as error:  # a ValueError is a NUL in the name
        raise ConfigError(
            f"{option}: {name!r} cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from None
