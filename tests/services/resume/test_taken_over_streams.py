"""Kept decodes of a worker that is killed: whoever may attach to them may in its next process, and nobody else."""

import secrets
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from support.clients.scraping import scrape
from support.clients.worker_calls import WorkerCalls, calls_to
from support.cluster.kept_worker import BEGUN, KeptWorker, attach, begin, kept_request, kept_worker
from support.cluster.several_processes import until

from baton.calls import unary
from baton.engine.v1 import decode_pb2, handoff_pb2
from baton.errors import PositionInvalid, StaleAttempt, StaleEpoch, StreamAdopted, StreamLost


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[KeptWorker]:
    with kept_worker(tmp_path / "log") as running:
        yield running


async def _alone(calls: WorkerCalls, request: decode_pb2.DecodeRequest) -> list[int]:
    request.request_id = secrets.token_hex(4)
    return (await calls.decode(request)).token_ids


@pytest.mark.timeout(300)
async def test_a_kept_decode_is_attached_to_in_the_next_process(worker: KeptWorker) -> None:
    async with calls_to(worker.process.address) as calls:
        expected = await _alone(calls, kept_request("", 400))
        logged = await _alone(calls, kept_request("", 400, logprobs=1))
        assert logged == expected
        await begin(calls, kept_request("logged", 400, logprobs=1))
        await begin(calls, kept_request("plain", 400))
        await worker.kill()
    async with calls_to(worker.process.address) as calls:
        for wrong in ({"secret": b"t" * 16}, {"owner_sha256": sha256(b"another").digest()}):
            with pytest.raises(StreamLost):
                await attach(calls, "plain", **wrong)
        with pytest.raises(StaleEpoch):
            await attach(calls, "plain", epoch=1)  # the reader means another process, whose connection will be closed
        with pytest.raises(PositionInvalid, match="log probabilities"):
            await attach(calls, "logged", from_tokens=BEGUN)
        attached, ids, finished = await attach(calls, "plain", attempt=4, from_tokens=BEGUN)
        assert [*attached.token_ids, *ids] == expected
        assert (attached.record, attached.hop, attached.attachment) == (b"record", 3, 2)
        assert attached.prompt == kept_request("plain", 400).prompt
        assert finished.usage.prompt_tokens == len(attached.prompt.token_ids)
        # Its end, and its last reader, outlive the next process too.
        await worker.kill()
    async with calls_to(worker.process.address) as calls:
        # The last reader goes on after the loss, which counts as no attempt of the client. One before it does not.
        for stale in (1, 3):
            with pytest.raises(StreamAdopted):
                await attach(calls, "plain", attachment=stale)
        for last in (2, 3):
            same, nothing, _ = await attach(calls, "plain", attachment=last)
            assert (list(same.token_ids), nothing, same.attachment) == (expected, [], last + 1)
    async with calls_to(worker.process.address) as calls:
        with pytest.raises(StaleAttempt):
            await attach(calls, "plain", attempt=4)
        again, nothing, finished_again = await attach(calls, "plain", attempt=5)
        assert (list(again.token_ids), nothing, again.attachment) == (expected, [], 5)
        assert finished_again.reason == finished.reason


@pytest.mark.timeout(300)
async def test_graces_deadlines_and_handoffs_end_typed_in_the_next_process(worker: KeptWorker) -> None:
    async with calls_to(worker.process.address) as calls:
        handoff = await calls.prefill("held", max_tokens=20)
        await begin(calls, kept_request("late", 1500), seconds=8.0)
        await begin(calls, kept_request("short", 1500, grace=2.0))
        await worker.kill()
    async with calls_to(worker.process.address) as calls:
        released = handoff_pb2.ReleaseRequest(handoff_id=handoff.handoff_id, epoch=handoff.epoch, reader="router:r")
        with pytest.raises(StaleEpoch):
            await unary(calls.handoffs.Release(released, timeout=30))
        assert scrape(worker.metrics).sum("baton_recovered_decodes_total", outcome="whole") == 2
        await until(lambda: scrape(worker.metrics).sum("baton_kv_blocks", state="used") == 0)
        for name in ("late", "short"):
            with pytest.raises(StreamLost):
                await attach(calls, name)
