"""The trace of a request whose decode is moved: it keeps the contract, and shows the move and its pause."""

from support.cluster.in_process import running_stream, simulated
from support.cluster.traced import traced
from support.eventually import PATIENCE_SECONDS

from baton.calls import unary
from baton.inference.v1 import cluster_service_pb2

LONG = {"prompt": "hello " * 20, "sampling": {"seed": 3}, "stopping": {"max_tokens": 200, "ignore_eos": True}}


async def test_a_trace_shows_that_a_decode_was_moved() -> None:
    async with traced(*(simulated(name, "decode", decode_step_seconds=0.005) for name in ("d1", "d2"))) as cluster:
        running = cluster.running
        async with running_stream(running, 20, **LONG) as task:
            [source] = [name for name, worker in running.workers.items() if worker.engines.load().running]
            request = cluster_service_pb2.MoveStreamsRequest(worker_id=source)
            await unary(running.operators.MoveStreams(request, timeout=PATIENCE_SECONDS))
            answer = await task
        assert answer.finished.moves == 1
        verdict = await cluster.verdict()
        assert (verdict.outcome, verdict.faults) == ("ok, aggregated", ())
        [migrated] = cluster.trace().named("migrated")
        [moved] = cluster.trace().named("move")
        for span in (migrated, moved):
            assert span.attributes["baton.move.source"] == source
            assert span.attributes["baton.move.target"] == answer.finished.decode_worker_id
        assert migrated.attributes["baton.move.outcome"] == "moved"
        assert moved.attributes["baton.move.rounds"] >= 1
