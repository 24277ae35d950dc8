"""The call of a request for pictures or clips: a worker's stream, which another worker goes on with where it broke."""

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from baton.calls import stream
from baton.engine.v1 import diffuse_pb2, diffuse_pb2_grpc
from baton.errors import InvalidReply
from baton.inference.v1 import image_pb2, video_pb2
from router.context import RequestContext
from router.placement.encoders import RoleWorkers
from router.routing.filters import Constraints
from router.workers.handle import WorkerHandle
from router.workers.role_calls import Metadata, RoleCall
from router.workers.watching.waiting_calls import Waiting

ROLE = "diffuse"
_PNG = b"\x89PNG\r\n\x1a\n"

Event = image_pb2.ImageProgress | image_pb2.GeneratedImage | video_pb2.VideoFrame | video_pb2.GeneratedVideo
Send = Callable[[Event], Awaitable[None]]


class DiffuseCall(RoleCall[None]):
    """The call for those pictures or clips that no worker has drawn yet. They have the same seeds on each."""

    role = ROLE
    tokens = 0

    def __init__(
        self, workers: RoleWorkers, ctx: RequestContext, request: diffuse_pb2.DiffuseRequest, send: Send
    ) -> None:
        self._workers = workers
        self._ctx = ctx
        self._request = request
        self._send = send
        self._left = dict(enumerate(request.seeds))
        self._is_clip = request.HasField("video")
        self._frames: Counter[int] = Counter()  # of each clip, of this worker
        self._waiting: Waiting | None = None

    def place(self, tried: frozenset[str]) -> WorkerHandle:
        constraints = Constraints(ROLE, self._request.model, context_tokens=0, tried=tried)
        return self._workers.place(constraints, self.tokens)

    def begin(self, worker: WorkerHandle) -> str:
        self._ctx.cancellation.add_worker(worker)
        return self._ctx.call_id

    def waits(self, waiting: Waiting) -> None:
        self._waiting = waiting

    async def run(self, worker: WorkerHandle, seconds: float, metadata: Metadata) -> None:
        # In a variable: as an attribute it would be a cycle, since it refers to this call.
        waiting, self._waiting = self._waiting, None
        indexes, request = list(self._left), diffuse_pb2.DiffuseRequest()
        self._frames.clear()
        request.CopyFrom(self._request)
        del request.seeds[:]
        request.seeds.extend(self._left.values())
        stub = worker.stub(diffuse_pb2_grpc.DiffuseServiceStub)
        async with aclosing(stream(stub.Diffuse(request, timeout=seconds, metadata=metadata))) as responses:
            async for response in responses:
                if waiting is not None:
                    waiting.asked_at = None  # it has just answered
                await self._send(self._checked(response, indexes))
        if self._left:
            raise InvalidReply(f"the stream ended before {len(self._left)} of the pictures were drawn")

    def _checked(self, response: diffuse_pb2.DiffuseResponse, indexes: list[int]) -> Event:
        """The event, with its drawing counted as the client counts. Raises InvalidReply."""
        match response.WhichOneof("event"):
            case "progress":
                event: Event = response.progress
            case "image" if not self._is_clip:
                event = response.image
                _check_png(event.data)
            case "frame" if self._is_clip:
                event = response.frame
                _check_png(event.data)
                self._count(event)
            case "video" if self._is_clip:
                event = response.video
                self._check_frames(event)
            case kind:
                raise InvalidReply(f"a response has no event of this call, but {kind}")
        if event.index >= len(indexes) or indexes[event.index] not in self._left:
            raise InvalidReply(f"there is no picture {event.index} to draw")
        event.index = indexes[event.index]
        if isinstance(event, image_pb2.GeneratedImage | video_pb2.GeneratedVideo):
            event.seed = self._left.pop(event.index)
        return event

    def _count(self, frame: video_pb2.VideoFrame) -> None:
        """Raises InvalidReply for a frame that is not the next one, or that was not asked for."""
        if frame.number != self._frames[frame.index] or frame.number >= self._request.video.frames:
            raise InvalidReply(f"frame {frame.number} of clip {frame.index} is not the next one")
        self._frames[frame.index] += 1

    def _check_frames(self, clip: video_pb2.GeneratedVideo) -> None:
        """Raises InvalidReply for a clip without all of its frames."""
        came, asked = self._frames[clip.index], self._request.video.frames
        if clip.frames != asked or (came != asked and not clip.data):
            raise InvalidReply(f"clip {clip.index} has {came} of {asked} frames")


def _check_png(content: bytes) -> None:
    if not content.startswith(_PNG):
        raise InvalidReply("a picture is no PNG")
