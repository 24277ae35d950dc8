"""No call begins on the channel of a worker that has left: those that chose it before fail, or go on without it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from google.protobuf.duration_pb2 import Duration
from support.eventually import eventually
from support.router.worker_views import worker as record_of

from baton.engine.v1 import decode_pb2, encode_pb2
from baton.errors import StreamLost, Unavailable
from baton.inference.v1 import generate_pb2
from router.multimodal.leases import EmbeddingLease, LeaseRenewer
from router.qos import RequestQos
from router.resume.attaching import Attacher, ResumeRequest
from router.resume.finding import _ask_one
from router.resume.handle import Handle
from router.workers.cancellation import Cancellation
from router.workers.handle import WorkerHandle
from rpc.channels import open_channel


@pytest.fixture
async def left() -> AsyncIterator[WorkerHandle]:
    """A worker whose channel is about to be closed, and still takes calls, which would be cancelled."""
    async with open_channel("127.0.0.1:1") as channel:
        worker = WorkerHandle(record_of("w1"), channel, channel, lambda: None)
        await worker.idle()
        yield worker


def test_a_user_of_its_channel_is_told(left: WorkerHandle) -> None:
    with pytest.raises(Unavailable, match="worker w1 has left"), left.keep_open():
        pass
    with pytest.raises(Unavailable, match="worker w1 has left"), left.track_load(0):
        pass
    assert left.requests == 0


async def test_an_answer_of_it_is_lost_and_is_computed_again(left: WorkerHandle) -> None:
    request = ResumeRequest(generate_pb2.ResumeGenerationRequest(), Handle.new("0" * 32), RequestQos(), None)
    attacher = Attacher(None, 1)  # type: ignore[arg-type]  # no worker is looked for
    with pytest.raises(StreamLost, match="worker w1 has left"):
        await attacher._look(0, left, request)
    async with AsyncExitStack() as attached:
        assert await attacher._attach_if_there(0, left, request, 1.0, attached) is None


async def test_it_is_not_asked_for_kept_answers(left: WorkerHandle) -> None:
    assert await _ask_one(left, decode_pb2.FindStreamsRequest(request_ids=["one"])) == ()


async def test_a_lease_on_its_embedding_is_kept_no_longer(left: WorkerHandle) -> None:
    message = encode_pb2.EmbeddingLease(handoff_id="one", epoch=1, lease=Duration(seconds=60))
    async with LeaseRenewer() as renewer:
        renewer.keep(EmbeddingLease(message, left))
        await eventually(lambda: not renewer._kept and not renewer._keeping)


async def test_a_request_whose_worker_it_was_is_cancelled_all_the_same(left: WorkerHandle) -> None:
    request = Cancellation("one")
    request._workers.append(left)
    request.close()
    assert await request.cancel("its client has left") == []
