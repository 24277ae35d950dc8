"""Media read from `file:` URIs, and attempts to leave the allowed folders."""

import os
import socket
from pathlib import Path

import pytest
from support.images.pictures import picture
from support.memory import peak_memory

from baton.errors import BatonError, FieldViolation, InvalidRequest, PermissionDenied, Unsupported
from media.config import FetchConfig, MediaConfig
from media.content import CheckedMedia, MediaItem
from media.loader import MediaLoader
from media.sources import files

PNG = picture("PNG")


async def load(uri: str, folder: Path) -> CheckedMedia:
    fetch = FetchConfig(allowed_folders=(str(folder),), timeout_seconds=2)
    async with MediaLoader(MediaConfig(max_bytes=2**20, fetch=fetch)) as loader:
        return await loader.load(MediaItem("media[1]", uri))


@pytest.mark.parametrize("form", ["file://{}", "file://localhost{}", "file:{}", "FILE://{}"])
async def test_a_file_in_an_allowed_folder_is_read(folder: Path, form: str) -> None:
    (folder / "a.png").write_bytes(PNG)
    assert (await load(form.format(folder / "a.png"), folder)).content == PNG


async def test_a_file_in_a_folder_inside_is_read(folder: Path) -> None:
    (folder / "inner" / "most").mkdir(parents=True)
    (folder / "inner" / "most" / "a.png").write_bytes(PNG)
    assert (await load(f"file://{folder}/inner/most/a.png", folder)).content == PNG


async def test_a_name_may_be_escaped(folder: Path) -> None:
    (folder / "ä ?#%.png").write_bytes(PNG)
    assert (await load(f"file://{folder}/%C3%A4%20%3F%23%25.png", folder)).content == PNG


async def test_a_link_that_stays_in_the_folder_is_followed(folder: Path) -> None:
    (folder / "blobs").mkdir()
    (folder / "blobs" / "1").write_bytes(PNG)
    (folder / "a.png").symlink_to("blobs/1")
    assert (await load(f"file://{folder}/a.png", folder)).content == PNG


async def test_an_allowed_folder_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (folder / "a.png").write_bytes(PNG)
    (tmp_path / "link").symlink_to(folder)
    assert (await load(f"file://{tmp_path}/link/a.png", tmp_path / "link")).content == PNG


@pytest.mark.parametrize(
    "path",
    [
        "{outside}/secret.png",
        "{folder}/../secret.png",
        "{folder}/%2e%2e/secret.png",
        "{folder}/inner/../../secret.png",
        "{folder}/./../secret.png",
        "{folder}2/secret.png",
        "{folder}//../secret.png",
        "{folder}/../allowed/a.png",  # no way out is taken, not even one that comes back
        "/etc/passwd",
        "//etc/passwd",
        "/",
        "/proc/self/environ",
        "{outside}/there-is-no-such-file",
    ],
)
async def test_a_path_that_leads_outside_is_denied(folder: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    (folder / "a.png").write_bytes(PNG)
    (tmp_path / "allowed2").mkdir()
    (tmp_path / "allowed2" / "secret.png").write_bytes(PNG)
    with pytest.raises(PermissionDenied) as denied:
        await load("file://" + path.format(folder=folder, outside=tmp_path), folder)
    assert str(denied.value) == "media[1].uri: the file is not in an allowed folder"


@pytest.mark.parametrize("target", ["../secret.png", "../missing.png", "/etc/passwd", "/proc/self/environ"])
async def test_a_link_that_leads_outside_is_denied_whether_its_end_exists_or_not(
    folder: Path, tmp_path: Path, target: str
) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    (folder / "a.png").symlink_to(target)
    with pytest.raises(PermissionDenied, match="is not in an allowed folder"):
        await load(f"file://{folder}/a.png", folder)


async def test_a_folder_that_is_a_link_outside_is_denied(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    (folder / "inner").symlink_to(tmp_path)
    with pytest.raises(PermissionDenied, match="is not in an allowed folder"):
        await load(f"file://{folder}/inner/secret.png", folder)


@pytest.mark.parametrize("way", ["a.png", "inner/a.png"])
def test_a_link_put_there_after_the_check_is_not_followed(
    folder: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.png").write_bytes(PNG)
    # The paths as they were before the links came: what a check that has lost the race has seen.
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)
    (folder / "inner").symlink_to(outside)
    (folder / "a.png").symlink_to(outside / "a.png")
    with pytest.raises((PermissionDenied, InvalidRequest)):
        files.read(f"file://{folder}/{way}", "media[1].uri", folders=[str(folder)], max_bytes=2**20)


async def test_a_link_to_itself_is_refused(folder: Path) -> None:
    (folder / "a.png").symlink_to("a.png")
    with pytest.raises(BatonError) as refused:
        await load(f"file://{folder}/a.png", folder)
    assert isinstance(refused.value, (PermissionDenied, InvalidRequest))


async def test_a_fifo_is_refused_at_once(folder: Path) -> None:
    os.mkfifo(folder / "a.png")
    with pytest.raises(InvalidRequest, match="is not a regular file"):
        await load(f"file://{folder}/a.png", folder)


async def test_a_socket_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("a.png")
        with pytest.raises(InvalidRequest, match="is not a regular file"):
            await load(f"file://{folder}/a.png", folder)


@pytest.mark.parametrize("name", ["zero", "null"])
async def test_a_device_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a regular file"):
        await load(f"file:///dev/{name}", Path("/dev"))


@pytest.mark.parametrize("path", ["", "/", "/inner", "/inner/"])
async def test_a_folder_is_refused(folder: Path, path: str) -> None:
    (folder / "inner").mkdir()
    with pytest.raises(InvalidRequest, match="is not a regular file"):
        await load(f"file://{folder}{path}", folder)


async def test_a_missing_file_is_said_to_be_missing(folder: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await load(f"file://{folder}/a.png", folder)
    assert refused.value.violations == (FieldViolation("media[1].uri", "the file does not exist"),)


async def test_a_file_below_a_file_is_refused(folder: Path) -> None:
    (folder / "a.png").write_bytes(PNG)
    with pytest.raises((PermissionDenied, InvalidRequest)):
        await load(f"file://{folder}/a.png/b.png", folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_a_file_that_may_not_be_read_is_denied(folder: Path) -> None:
    (folder / "a.png").write_bytes(PNG)
    (folder / "a.png").chmod(0)
    with pytest.raises(PermissionDenied, match="may not be read"):
        await load(f"file://{folder}/a.png", folder)


async def test_a_file_over_the_limit_is_refused_unread(folder: Path) -> None:
    with (folder / "a.png").open("wb") as file:
        file.truncate(10 * 2**30)  # a hole, which takes no room
    with peak_memory() as peak, pytest.raises(InvalidRequest, match="is larger than the limit of 1048576 bytes"):
        await load(f"file://{folder}/a.png", folder)
    assert peak.megabytes < 20


async def test_a_file_that_has_no_size_of_its_own_is_read_to_the_limit() -> None:
    # Made up while it is read: its size is 0 for everyone who asks.
    with pytest.raises(InvalidRequest, match="is larger than the limit of 8 bytes"):
        files.read("file:///proc/self/status", "media[1].uri", folders=["/proc"], max_bytes=8)


async def test_what_is_in_a_file_that_is_no_image_is_not_shown(folder: Path) -> None:
    (folder / "a.png").write_text("password = 12345678")
    with pytest.raises(Unsupported) as refused:
        await load(f"file://{folder}/a.png", folder)
    assert "password" not in str(refused.value)


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("file://server/share/a.png", "names a host; expected file:///path"),
        ("file:a.png", "has no absolute path; expected file:///path"),
        ("file:", "has no absolute path; expected file:///path"),
        ("file:///a%00.png", "has no absolute path; expected file:///path"),
        ("file:///a.png?b", "has a query or a fragment; escape '?' and '#' in a file's name"),
        ("file:///a.png#b", "has a query or a fragment; escape '?' and '#' in a file's name"),
    ],
)
async def test_a_file_uri_of_another_form_is_refused(folder: Path, uri: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await load(uri, folder)
    assert refused.value.violations == (FieldViolation("media[1].uri", problem),)


async def test_reading_leaves_no_descriptor_open(folder: Path) -> None:
    (folder / "a.png").write_bytes(PNG)
    for _ in range(5):
        await load(f"file://{folder}/a.png", folder)
        with pytest.raises(InvalidRequest):
            await load(f"file://{folder}/b.png", folder)
    assert open_below(folder) == []


def open_below(folder: Path) -> list[str]:
    """The descriptors of this process for a folder and its files: those of earlier tests' connections come and go."""
    links = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    return [each for each in links if each.startswith(str(folder.resolve()))]
