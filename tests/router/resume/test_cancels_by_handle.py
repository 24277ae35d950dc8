"""A cancel by an answer's handle ends it, whichever router reads it, now or in between."""

import asyncio
from itertools import count
from typing import Any

import pytest
from support.clients.resuming import Received
from support.cluster.in_process import PATIENT, bench, simulated
from support.cluster.router_pair import Pair, kept_request, read, router_pair
from support.eventually import eventually

from baton.calls import unary
from baton.engine.v1 import decode_pb2
from baton.errors import Cancelled, StreamLost, Unavailable
from baton.inference.v1 import generate_pb2, inference_service_pb2_grpc
from router.resume import finding
from router.resume.attaching import Adopted, Attacher
from router.resume.handle import Handle
from router.server import host_router
from router.workers.calls import WorkerCalls
from rpc.channels import open_channel
from runtime.aio import timeout
from services.resume.streams import KeptStreams

_ROLES = ("prefill+decode", "prefill+decode")
_LONG = {"max_tokens": 900}


async def _cancel(stub: Any, received: Received) -> None:
    await unary(stub.CancelGeneration(generate_pb2.CancelGenerationRequest(handle=received.handle)))


class _Interrupted:
    """Holds a cancel back between its look at an answer and what follows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_looked, self.may_go_on = asyncio.Event(), asyncio.Event()
        peek = Attacher.peek

        async def interrupted(*arguments: Any) -> Adopted:
            found = await peek(*arguments)
            self.has_looked.set()
            await self.may_go_on.wait()
            return found

        monkeypatch.setattr(Attacher, "peek", interrupted)


class _BetweenWorkers:
    """Holds a router back before its second decode of an answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there, self.may_go_on = asyncio.Event(), asyncio.Event()
        decode = WorkerCalls.decode
        decodes = count(1)

        async def held_back(*arguments: Any) -> None:
            if next(decodes) == 2:
                self.is_there.set()
                await self.may_go_on.wait()
            await decode(*arguments)

        monkeypatch.setattr(WorkerCalls, "decode", held_back)


async def _all_ends(pair: Pair) -> None:
    """Long before the grace does."""
    await eventually(lambda: pair.running.used_blocks() == 0, 1.5)
    assert not any(len(worker.kept) for worker in pair.running.workers.values())


@pytest.mark.parametrize("answers", [1, 3])
async def test_it_ends_an_answer_that_another_router_reads(answers: int) -> None:
    request = kept_request(stopping=_LONG, sampling={"n": answers, "seed": 1})
    async with router_pair(*_ROLES, decode_step_seconds=0.01) as pair:
        received = Received(request)
        reading = asyncio.create_task(read(pair.first.Generate(request), received))
        await eventually(lambda: received.tokens > 10)
        await _cancel(pair.second, received)
        with pytest.raises(Cancelled):
            await reading
        await _all_ends(pair)


def _of_an_earlier_version(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = KeptStreams.settle

    def by_attachment(kept: KeptStreams, request: decode_pb2.SettleRequest) -> bool:
        asked = decode_pb2.SettleRequest(
            request_id=request.request_id, attachment=request.attachment, forget=request.forget
        )
        settle(kept, asked)
        return False

    monkeypatch.setattr(KeptStreams, "settle", by_attachment)


@pytest.mark.parametrize("is_earlier", [False, True])
async def test_it_ends_an_answer_that_another_router_attaches_to_after_the_look(
    monkeypatch: pytest.MonkeyPatch, *, is_earlier: bool
) -> None:
    if is_earlier:
        _of_an_earlier_version(monkeypatch)
    request = kept_request(stopping=_LONG)
    async with router_pair("prefill+decode", decode_step_seconds=0.01) as pair:
        received = await read(pair.first.Generate(request), Received(request), until=10)
        between = _Interrupted(monkeypatch)
        cancelling = asyncio.create_task(_cancel(pair.second, received))
        await between.has_looked.wait()
        await read(pair.first.ResumeGeneration(received.resume()), received, until=30)
        between.may_go_on.set()
        await cancelling
        await _all_ends(pair)


_ROUTERS = pytest.mark.parametrize("is_readers", [True, False], ids=["its router", "another one"])


async def _cancel_what_no_worker_has(pair: Pair, received: Received, *, is_readers: bool) -> None:
    """The reader's router ends it itself; another one says that no worker has it, and has its next decode refused."""
    if is_readers:
        await _cancel(pair.first, received)
        return
    with pytest.raises(StreamLost, match="from now on they refuse to go on with it"):
        await _cancel(pair.second, received)


@_ROUTERS
@pytest.mark.parametrize("answers", [1, 3])
async def test_it_ends_answers_whose_prompts_are_still_computed(answers: int, *, is_readers: bool) -> None:
    routing = {"topology": generate_pb2.TOPOLOGY_DISAGGREGATED}
    request = kept_request(stopping=_LONG, sampling={"n": answers, "seed": 1}, routing=routing)
    async with router_pair("prefill", "decode", decode_step_seconds=0.01, prefill_base_seconds=0.5) as pair:
        received = Received(request)
        reading = asyncio.create_task(read(pair.first.Generate(request), received))
        await eventually(lambda: bool(received.handle))
        await _cancel_what_no_worker_has(pair, received, is_readers=is_readers)
        with pytest.raises(Cancelled):
            await reading
        await _all_ends(pair)


@_ROUTERS
async def test_it_ends_an_answer_whose_router_is_between_two_workers(
    monkeypatch: pytest.MonkeyPatch, *, is_readers: bool
) -> None:
    between = _BetweenWorkers(monkeypatch)
    request = kept_request(stopping=_LONG)
    async with router_pair(*_ROLES, decode_step_seconds=0.01) as pair:
        received = Received(request)
        reading = asyncio.create_task(read(pair.first.Generate(request), received))
        await eventually(lambda: received.tokens > 5)
        worker_id = next(name for name, worker in pair.running.workers.items() if len(worker.kept))
        await pair.running.stop(worker_id)
        await between.is_there.wait()
        await _cancel_what_no_worker_has(pair, received, is_readers=is_readers)
        between.may_go_on.set()
        with pytest.raises(Cancelled):
            await reading
        await _all_ends(pair)


async def test_it_ends_the_other_answers_of_a_request_whose_first_one_is_lost() -> None:
    request = kept_request(stopping=_LONG, sampling={"n": 3, "seed": 1})
    async with router_pair("prefill+decode", decode_step_seconds=0.01) as pair:
        received = await read(pair.first.Generate(request), Received(request), until=10)
        [worker] = pair.running.workers.values()
        first = next(one for one in worker.kept.streams if one.kept.request_id == Handle.parse(received.handle).call_id)
        lost = decode_pb2.SettleRequest(request_id=first.kept.request_id, attachment=first.attachment, forget=True)
        worker.kept.settle(lost)
        assert len(worker.kept) == 2
        await _cancel(pair.second, received)
        await _all_ends(pair)
        with pytest.raises(StreamLost):
            await _cancel(pair.first, received)


@pytest.mark.parametrize("answers", [1, 3])
async def test_it_does_not_say_that_nothing_is_left_while_a_worker_is_silent(
    monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    monkeypatch.setattr(finding, "_ANSWER_SECONDS", 0.3)
    request = kept_request(stopping=_LONG, sampling={"n": answers, "seed": 1})
    request.response.keep.seconds = 30
    worker = simulated("worker", "prefill", "decode", decode_step_seconds=0.01)
    async with timeout(50), bench(worker, router=PATIENT) as running, host_router(PATIENT, running.registry) as other:
        await eventually(lambda: any(not worker.problem for worker in other.cluster.workers))
        async with open_channel(other.address) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            received = await read(running.stub.Generate(request), Received(request), until=10)
            running.proxies["worker"].freeze()
            with pytest.raises(Unavailable, match="worker worker has not answered"):
                await _cancel(stub, received)
            assert running.used_blocks()
            await running.proxies["worker"].restore()
            await _cancel(stub, received)
            await eventually(lambda: running.used_blocks() == 0, 1.5)
            # Now all workers have answered.
            with pytest.raises(StreamLost):
                await _cancel(stub, received)
