"""Workers that refuse requests which other workers take: they are believed in what only an engine can know."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from grpc import aio
from support.clients.scraping import since
from support.cluster.in_process import DECODE, PREFILL, Bench, Stream, bench
from support.eventually import eventually
from support.servers.broken_worker import LANES, LONG, PATIENT, asked_until_called, beside
from support.servers.tampering import Ends, Reply

from baton.error_details import from_rpc_error
from baton.errors import BatonError, FieldViolation, InvalidRequest, Unsupported
from baton.inference.v1 import cluster_service_pb2


class Newer(InvalidRequest):
    """An error of a version to come."""

    reason = "NEWER_THAN_KNOWN"

    def __init__(self, message: str) -> None:
        super().__init__([FieldViolation("guided.newer", message)])


# The refusals of a request that no other worker refuses: without Baton's details, or of what the router has checked.
REFUSALS: dict[str, Callable[[Any], Iterable[Reply]]] = {
    "invalid argument": lambda _: [Ends(3)],
    "out of range": lambda _: [Ends(11)],
    "unimplemented": lambda _: [Ends(12)],
    "too large": lambda _: [Ends(8, "Received message larger than max (9 vs. 4)")],
    "an unknown reason": lambda _: [Ends.by(Newer("broken"))],
    "a checked option": lambda _: [Ends.by(InvalidRequest.of("sampling.params.temperature", "is broken"))],
    "a refusal of nothing": lambda _: [Ends.by(InvalidRequest([]))],
}


@LANES
@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_alone_refuses_is_passed_over(
    role: str, name: str, multiplexed: bool, undisturbed: Stream
) -> None:
    async with (
        bench(PREFILL, DECODE, router=PATIENT) as running,
        beside(running, role, multiplexed=multiplexed) as broken,
    ):
        broken.changes[role.capitalize()] = REFUSALS[name]
        stream = await asked_until_called(running, broken, role.capitalize(), undisturbed)
        assert stream.finished.decode_worker_id == "d1"
        assert stream.finished.migrations == 1
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_worker_that_alone_refuses_gets_no_requests_for_a_while_and_is_counted(undisturbed: Stream) -> None:
    faults = since("baton_router_worker_faults_total", stage="decode")
    async with bench(PREFILL, DECODE) as running, beside(running, "decode", multiplexed=True) as broken:
        broken.changes["Decode"] = REFUSALS["invalid argument"]
        await asked_until_called(running, broken, "Decode", undisturbed)
        [state] = [one for one in await running.list_workers() if one.worker_id == "broken"]
        assert state.state == cluster_service_pb2.WORKER_STATE_UNHEALTHY
        assert "its replies are wrong" in state.problem
        await asyncio.gather(*(running.generate(**LONG) for _ in range(8)))
        assert (broken.calls["Decode"], faults.grown) == (1, 1)


BELIEVED: dict[str, tuple[Ends, str]] = {
    "a grammar": (Ends.by(InvalidRequest.of("guided.regex", "is too large")), "INVALID_REQUEST"),
    "a prompt": (Ends.by(InvalidRequest.of("prompt", "does not fit the pool")), "INVALID_REQUEST"),
    "a feature": (Ends.by(Unsupported("guided: cannot be combined with min_tokens")), "UNSUPPORTED"),
}


@pytest.mark.parametrize("name", BELIEVED)
async def test_a_refusal_that_only_a_worker_can_know_reaches_the_client_at_once(name: str) -> None:
    ends, reason = BELIEVED[name]
    async with bench(DECODE, router=PATIENT) as running, beside(running, "prefill", multiplexed=True) as worker:
        worker.changes["Prefill"] = lambda _: [ends]
        error = await refused(running)
        assert (error.reason, error.worker_id, worker.calls["Prefill"]) == (reason, "broken", 1)


@pytest.mark.parametrize("name", BELIEVED)
async def test_a_worker_that_refuses_everything_in_an_engines_words_is_found_out_after_a_few(name: str) -> None:
    ends, reason = BELIEVED[name]
    async with bench(PREFILL, DECODE, router=PATIENT) as running, beside(running, "decode", multiplexed=True) as worker:
        worker.changes["Decode"] = lambda _: [ends]
        reasons = []
        while worker.calls["Decode"] < 4:
            reasons.append(await outcome(running))
        assert reasons.count(reason) == 3
        assert reasons[-1] == "OK"
        [state] = [one for one in await running.list_workers() if one.worker_id == "broken"]
        assert "its replies are wrong" in state.problem


async def test_a_worker_that_answers_in_between_is_believed() -> None:
    ends, reason = BELIEVED["a grammar"]
    async with bench(PREFILL, DECODE, router=PATIENT) as running, beside(running, "decode", multiplexed=True) as worker:
        for _ in range(6):
            worker.changes["Decode"] = lambda _: [ends]
            while await outcome(running) != reason:
                pass
            worker.changes.clear()
            called = worker.calls["Decode"]
            while worker.calls["Decode"] == called:
                assert await outcome(running) == "OK"


@LANES
@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refusal_that_no_other_worker_contradicts_reaches_the_client(name: str, multiplexed: bool) -> None:
    async with bench() as running, beside(running, "decode", multiplexed=multiplexed) as worker:
        worker.changes["Decode"] = REFUSALS[name]
        error = await refused(running)
        assert error.reason == ("UNSUPPORTED" if name == "unimplemented" else "INVALID_REQUEST")
        assert (error.worker_id, error.stage) == ("broken", "decode")
        # It is believed, and the worker goes on.
        worker.changes.clear()
        assert len((await running.generate(**LONG)).token_ids) == 60


async def outcome(running: Bench) -> str:
    try:
        await running.generate(**LONG)
    except aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return "OK"


async def refused(running: Bench) -> BatonError:
    with pytest.raises(aio.AioRpcError) as caught:
        await running.generate(**LONG)
    return from_rpc_error(caught.value)
