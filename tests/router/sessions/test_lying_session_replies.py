"""Impossible reports of workers about sessions reach no client as an error."""

from support.cluster.in_process import bench, simulated
from support.servers.tampering import tampered

from baton.calls import unary
from baton.engine.v1 import worker_pb2
from baton.inference.v1 import generate_pb2


async def test_more_released_blocks_than_an_answer_can_say_are_as_many_as_it_can() -> None:
    async with (
        bench() as running,
        tampered(running, simulated("p1", "prefill"), multiplexed=True) as one,
        tampered(running, simulated("d1", "decode"), multiplexed=True) as another,
    ):
        for worker in (one, another):
            worker.changes["EndSession"] = lambda _: [worker_pb2.EndSessionResponse(released_blocks=2**32 - 1)]
        answer = await unary(running.stub.EndSession(generate_pb2.EndSessionRequest(session_key="x"), timeout=60))
    assert answer.released_blocks == 2**32 - 1
