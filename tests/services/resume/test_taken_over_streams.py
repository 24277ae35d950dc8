"""Kept decodes of a worker that is killed: whoever may attach to them may in its next process, and nobody else."""

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.clients.scraping import scrape
from support.clients.worker_calls import WorkerCalls, calls_to, decode_request
from support.cluster.processes import Process, process
from support.cluster.several_processes import until
from support.servers.etcd import free_port

from baton.calls import stream, unary
from baton.engine.v1 import decode_pb2, handoff_pb2
from baton.errors import PositionInvalid, StaleAttempt, StaleEpoch, StreamAdopted, StreamLost

_ENGINE = "engine={kind: pytorch, model: models/demo, execution: fused, threads: 1, kv_cache_bytes: 16MiB}"
_SECRET, _OWNER, _BEGUN = b"s" * 16, sha256(b"owner").digest(), 5


@dataclass(slots=True)
class Kept:
    """A worker with a keeper."""

    process: Process
    metrics: str
    deaths: int = 0

    async def kill(self) -> None:
        """Kills the worker, and waits for its next process."""
        [child] = psutil.Process(self.process.popen.pid).children()
        child.kill()
        self.deaths += 1
        await until(self._is_back)

    def _is_back(self) -> bool:
        return self.process.log.read_text().count("worker was started again") == self.deaths


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Kept]:
    metrics = f"127.0.0.1:{free_port()}"
    overrides = [_ENGINE, "registry.kind=memory", "keep_memory={weights: true, kv: true}", "drain_seconds=0"]
    with process("services", "worker.yaml", [*overrides, f"metrics_listen={metrics}"], tmp_path / "log") as started:
        started.wait_until_serving()
        yield Kept(started, metrics)


def _request(name: str, tokens: int, grace: float = 60.0, **fields: Any) -> decode_pb2.DecodeRequest:
    request = decode_request(request_id=name, max_tokens=tokens)
    request.sampling.stop.ignore_eos = True
    request.sampling.params.temperature, request.sampling.params.seed = 0.9, 7
    for field, value in fields.items():
        setattr(request.sampling, field, value)
    request.keep.secret_sha256, request.keep.owner_sha256 = sha256(_SECRET).digest(), _OWNER
    request.keep.record, request.keep.hop = b"record", 3
    request.keep.grace.FromNanoseconds(int(grace * 1e9))
    return request


async def _begin(calls: WorkerCalls, request: decode_pb2.DecodeRequest, seconds: float = 300.0) -> None:
    """Begins a decode, and leaves it after some tokens."""
    count = 0
    async with aclosing(stream(calls.decodes.Decode(request, timeout=seconds))) as responses:
        async for response in responses:
            count += len(response.tokens.token_ids)
            if count >= _BEGUN:
                return


async def _attach(
    calls: WorkerCalls, name: str, **fields: Any
) -> tuple[decode_pb2.DecodeAttached, list[int], decode_pb2.DecodeFinished]:
    asked = decode_pb2.AttachRequest(request_id=name, **{"secret": _SECRET, "owner_sha256": _OWNER, **fields})
    responses = [response async for response in stream(calls.decodes.Attach(asked, timeout=120))]
    ids = [token_id for response in responses for token_id in response.tokens.token_ids]
    return responses[0].attached, ids, responses[-1].finished


async def _alone(calls: WorkerCalls, request: decode_pb2.DecodeRequest) -> list[int]:
    request.request_id = secrets.token_hex(4)
    return (await calls.decode(request)).token_ids


@pytest.mark.timeout(300)
async def test_a_kept_decode_is_attached_to_in_the_next_process(worker: Kept) -> None:
    async with calls_to(worker.process.address) as calls:
        expected = await _alone(calls, _request("", 400))
        logged = await _alone(calls, _request("", 400, logprobs=1))
        assert logged == expected
        await _begin(calls, _request("logged", 400, logprobs=1))
        await _begin(calls, _request("plain", 400))
        await worker.kill()
    async with calls_to(worker.process.address) as calls:
        for wrong in ({"secret": b"t" * 16}, {"owner_sha256": sha256(b"another").digest()}):
            with pytest.raises(StreamLost):
                await _attach(calls, "plain", **wrong)
        with pytest.raises(PositionInvalid, match="log probabilities"):
            await _attach(calls, "logged", from_tokens=_BEGUN)
        attached, ids, finished = await _attach(calls, "plain", attempt=4, from_tokens=_BEGUN)
        assert [*attached.token_ids, *ids] == expected
        assert (attached.record, attached.hop, attached.attachment) == (b"record", 3, 2)
        assert attached.prompt == _request("plain", 400).prompt
        assert finished.usage.prompt_tokens == len(attached.prompt.token_ids)
        # Its end, and its last reader, outlive the next process too.
        await worker.kill()
    async with calls_to(worker.process.address) as calls:
        # The last reader goes on after the loss, which counts as no attempt of the client. One before it does not.
        for stale in (1, 3):
            with pytest.raises(StreamAdopted):
                await _attach(calls, "plain", attachment=stale)
        for last in (2, 3):
            same, nothing, _ = await _attach(calls, "plain", attachment=last)
            assert (list(same.token_ids), nothing, same.attachment) == (expected, [], last + 1)
    async with calls_to(worker.process.address) as calls:
        with pytest.raises(StaleAttempt):
            await _attach(calls, "plain", attempt=4)
        again, nothing, finished_again = await _attach(calls, "plain", attempt=5)
        assert (list(again.token_ids), nothing, again.attachment) == (expected, [], 5)
        assert finished_again.reason == finished.reason


@pytest.mark.timeout(300)
async def test_graces_deadlines_and_handoffs_end_typed_in_the_next_process(worker: Kept) -> None:
    async with calls_to(worker.process.address) as calls:
        handoff = await calls.prefill("held", max_tokens=20)
        await _begin(calls, _request("late", 1500), seconds=8.0)
        await _begin(calls, _request("short", 1500, grace=2.0))
        await worker.kill()
    async with calls_to(worker.process.address) as calls:
        released = handoff_pb2.ReleaseRequest(handoff_id=handoff.handoff_id, epoch=handoff.epoch, reader="router:r")
        with pytest.raises(StaleEpoch):
            await unary(calls.handoffs.Release(released, timeout=30))
        assert scrape(worker.metrics).sum("baton_recovered_decodes_total", outcome="whole") == 2
        await until(lambda: scrape(worker.metrics).sum("baton_kv_blocks", state="used") == 0)
        for name in ("late", "short"):
            with pytest.raises(StreamLost):
                await _attach(calls, name)
