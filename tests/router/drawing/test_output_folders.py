"""Pictures and clips that the router writes into a folder, instead of sending them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cluster.in_process import FAST_ROUTER, Bench, bench, simulated

from baton.calls import stream
from baton.errors import BatonError, InvalidRequest, PermissionDenied, Unsupported
from baton.inference.v1 import image_pb2, image_pb2_grpc, video_pb2, video_pb2_grpc
from media.config import MediaConfig
from router.config import RouterConfig
from rpc.channels import open_channel

F1 = simulated("f1", "diffuse")
OPTIONS = image_pb2.ImageOptions(prompt="a red circle", seed=1, number=2)


def writing_to(*folders: Path) -> RouterConfig:
    return FAST_ROUTER.model_copy(update={"media": MediaConfig(output_folders=tuple(map(str, folders)))})


async def pictures(running: Bench, output_uri: str = "") -> Sequence[image_pb2.GeneratedImage]:
    request = image_pb2.ImageServiceGenerateRequest(options=OPTIONS, output_uri=output_uri)
    async with open_channel(running.address) as channel:
        call = image_pb2_grpc.ImageServiceStub(channel).Generate(request, timeout=30)
        found = [response.image async for response in stream(call) if response.HasField("image")]
    return sorted(found, key=lambda image: image.index)


async def test_a_picture_has_the_address_of_its_file_instead_of_its_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "of today"
    folder.mkdir(parents=True)
    async with bench(F1, router=writing_to(tmp_path / "out")) as running:
        written, again = [await pictures(running, folder.as_uri()) for _ in range(2)]
        sent = await pictures(running)
    assert [image.data for image in written] == [b"", b""]
    assert [image.uri for image in sent] == ["", ""]
    found = [_path(image.uri) for image in written]
    assert [path.read_bytes() for path in found] == [image.data for image in sent]
    assert {path.parent for path in found} == {folder}
    assert len({image.uri for image in (*written, *again)}) == 4


def _path(uri: str) -> Path:
    return Path(uri.removeprefix("file://").replace("%20", " "))


async def test_the_frames_of_a_clip_are_files_too(tmp_path: Path) -> None:
    request: Any = video_pb2.VideoServiceGenerateRequest(options=OPTIONS, output_uri=tmp_path.as_uri())
    async with bench(F1, router=writing_to(tmp_path)) as running, open_channel(running.address) as channel:
        call = video_pb2_grpc.VideoServiceStub(channel).Generate(request, timeout=30)
        events = [response async for response in stream(call)]
    frames = [event.frame for event in events if event.HasField("frame")]
    assert {frame.data for frame in frames} == {b""}
    assert {_path(frame.uri) for frame in frames} == {tmp_path / name for name in os.listdir(tmp_path)}
    assert len(frames) == 8


async def test_nothing_is_written_outside_and_nothing_is_drawn_for_it(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "in", tmp_path / "outside"
    allowed.mkdir()
    outside.mkdir()
    (allowed / "link").symlink_to(outside)
    (allowed / "file").write_text("")
    refused: dict[str, type[BatonError]] = {
        outside.as_uri(): PermissionDenied,
        f"{allowed.as_uri()}/../outside": PermissionDenied,
        f"{allowed.as_uri()}/%2e%2e/outside": PermissionDenied,
        (allowed / "link").as_uri(): PermissionDenied,
        f"{allowed.as_uri()}/none": InvalidRequest,
        f"{allowed.as_uri()}/file": InvalidRequest,
        "file://elsewhere/in": InvalidRequest,
        "https://example.org/in": Unsupported,
        "in": InvalidRequest,
    }
    async with bench(F1, router=writing_to(allowed)) as running:
        for uri, error in refused.items():
            with pytest.raises(error, match="output_uri"):
                await pictures(running, uri)
        assert running.workers["f1"].engines.part("diffuser").steps == 0
    assert sorted(os.listdir(outside)) == []


async def test_by_default_nothing_may_be_written(tmp_path: Path) -> None:
    async with bench(F1) as running:
        with pytest.raises(PermissionDenied, match=r"media\.output_folders"):
            await pictures(running, tmp_path.as_uri())


def test_a_folder_that_is_not_absolute_is_refused() -> None:
    with pytest.raises(ValueError, match="output_folders"):
        MediaConfig(output_folders=("here",))
