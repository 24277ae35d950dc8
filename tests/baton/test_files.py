"""Files that a user names are read within a limit, whatever they are."""

import os
import threading
from pathlib import Path

import pytest

from baton import Tls
from baton.errors import ConfigError, InvalidRequest
from baton.files import read_file
from baton.images import media_item
from cli.arguments import parse
from cli.connection import find_credentials
from cli.request import build


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="has more than 4 bytes"):
        read_file(path, 4)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(writing, b"a" * 100_000), os.close(writing)))
    writer.start()
    assert read_file(f"/dev/fd/{reading}", 200_000) == b"a" * 100_000
    writer.join()
    os.close(reading)


def test_a_pipe_that_nothing_writes_to_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_file(tmp_path / "pipe", 10) == b""


@pytest.mark.parametrize("name", ["/dev/zero", "/", "a\0b"])
def test_what_is_no_file_is_refused(name: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - the system says why
        read_file(name, 10)


def test_everything_that_names_a_file_refuses_a_device() -> None:
    with pytest.raises(InvalidRequest, match="image /dev/zero"):
        media_item(Path("/dev/zero"))
    for option in ("--json-schema", "--grammar", "--image"):
        with pytest.raises(InvalidRequest, match="neither a file nor a pipe"):
            build(parse(["generate", "x", option, "/dev/zero"]))
    with pytest.raises(ConfigError, match="token-file"):
        find_credentials(parse(["generate", "x", "--token-file", "/dev/zero"]))
    with pytest.raises(ConfigError, match=r"tls\.ca"):
        Tls(ca="/dev/zero").channel_credentials()
