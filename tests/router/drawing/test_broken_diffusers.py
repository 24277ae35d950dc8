"""Workers that draw, and send frames that do not match: the client gets none of them."""

from collections.abc import AsyncIterator, Callable, Iterable

import pytest
from support.cluster.in_process import bench, simulated
from support.servers.broken_worker import PATIENT
from support.servers.tampering import Reply, tampered

from baton.calls import stream
from baton.engine.v1 import diffuse_pb2
from baton.errors import BatonError
from baton.inference.v1 import image_pb2, video_pb2, video_pb2_grpc
from rpc.channels import open_channel
from services.engines.simulated.diffuser import _RULES

FRAMES = _RULES.clips.frames if _RULES.clips else 0
Change = Callable[[diffuse_pb2.DiffuseResponse], Iterable[Reply]]


def at_frame(number: int, change: Callable[[diffuse_pb2.DiffuseResponse], Iterable[Reply]]) -> Change:
    return lambda reply: change(reply) if reply.HasField("frame") and reply.frame.number == number else [reply]


def numbered(reply: diffuse_pb2.DiffuseResponse, number: int) -> diffuse_pb2.DiffuseResponse:
    other = diffuse_pb2.DiffuseResponse()
    other.CopyFrom(reply)
    other.frame.number = number
    return other


def fewer(reply: diffuse_pb2.DiffuseResponse) -> Iterable[Reply]:
    """A clip that says itself that it has fewer frames than were asked for."""
    if reply.HasField("video"):
        reply.video.frames = 1
    return [reply]


def _of_clip(reply: diffuse_pb2.DiffuseResponse, index: int) -> diffuse_pb2.DiffuseResponse:
    reply.frame.index = index
    return reply


BROKEN: dict[str, Change] = {
    "a frame twice": at_frame(1, lambda reply: [reply, reply]),
    "a frame left out": at_frame(1, lambda _reply: []),
    "the last frame left out": at_frame(FRAMES - 1, lambda _reply: []),
    "a number of its own": at_frame(2, lambda reply: [numbered(reply, 2**32 - 1)]),
    "too many frames": at_frame(FRAMES - 1, lambda reply: [numbered(reply, FRAMES - 1 + more) for more in range(500)]),
    "a clip of fewer frames": fewer,
    "an unknown clip": at_frame(0, lambda reply: [_of_clip(reply, 7)]),
}


@pytest.mark.parametrize("asked", [True, False], ids=["frames", "default"])
@pytest.mark.parametrize("name", BROKEN)
async def test_frames_that_are_not_the_next_ones_are_a_failure_of_the_worker(name: str, *, asked: bool) -> None:
    options = image_pb2.ImageOptions(prompt="a circle", steps=1)
    video = video_pb2.VideoOptions(frames=FRAMES if asked else None)
    request = video_pb2.VideoServiceGenerateRequest(options=options, video=video)
    numbers: list[int] = []
    async with (
        bench(router=PATIENT) as running,
        tampered(running, simulated("broken", "diffuse"), multiplexed=False) as worker,
        open_channel(running.address) as channel,
    ):
        worker.changes["Diffuse"] = BROKEN[name]
        call = video_pb2_grpc.VideoServiceStub(channel).Generate(request, timeout=30)
        with pytest.raises(BatonError):
            await _read(stream(call), numbers)
    assert numbers == [*range(len(numbers))]
    assert len(numbers) <= FRAMES


async def _read(responses: AsyncIterator[video_pb2.VideoServiceGenerateResponse], numbers: list[int]) -> None:
    """Adds the numbers of the frames as they come."""
    async for each in responses:
        assert not each.HasField("video")
        numbers += [each.frame.number] if each.HasField("frame") else []
