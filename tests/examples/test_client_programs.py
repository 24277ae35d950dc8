"""The client programs of examples/, one in each language, against real clusters: all meet one contract."""

import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from support.clients.examples import LIBRARIES, PROGRAMS, WITHIN_SECONDS, Program
from support.cluster.demo import demo_worker
from support.cluster.in_process import PATIENT, Bench, bench, simulated
from support.eventually import eventually
from support.sampled import sampled
from support.servers.etcd import free_port
from support.servers.tcp_proxy import TcpProxy

from baton.inference.v1 import generate_pb2
from router.config import AdmissionConfig
from router.server import host_router

pytestmark = WITHIN_SECONDS

SELECTED = [each for each in os.environ.get("BATON_CLIENTS", "").split() or PROGRAMS if each != LIBRARIES]
CANCELLED, INVALID_ARGUMENT, DEADLINE_EXCEEDED = 1, 3, 4


# All meet one contract: those that are not built, or in a second, are in each run.
_QUICK = [each for each in SELECTED if each not in ("java", "cpp")] or SELECTED


@pytest.fixture(scope="module", params=sampled(SELECTED, _QUICK) if SELECTED else [])
def program(request: pytest.FixtureRequest) -> Program:
    built = PROGRAMS[request.param]
    built.build()
    return built


@asynccontextmanager
async def slow(max_running: int = 0, listen: str = "127.0.0.1:0") -> AsyncIterator[Bench]:
    """Workers that take 20 ms a token, and do not stop soon. Beyond `max_running` they refuse."""
    admission = AdmissionConfig(max_running_per_worker=max_running, max_waiting=0)
    router = PATIENT.model_copy(update={"admission": admission, "listen": listen})
    workers = simulated("p", "prefill"), simulated("d", "decode", decode_step_seconds=0.02)
    async with bench(*workers, router=router) as running:
        yield running


async def test_the_demonstrations_answer_is_printed(program: Program) -> None:
    async with bench(demo_worker("prefill"), demo_worker("decode"), router=PATIENT) as running:
        done = await program.run(running.address, "stream", "Sort: pear apple mango")
        assert (done.code, done.out) == (0, "apple mango pear\n"), done.err


async def test_text_is_printed_while_more_is_to_come(program: Program) -> None:
    async with slow() as running, program.started(running.address, "stream", "x") as process:
        assert process.stdout is not None
        assert len(await process.stdout.readexactly(2)) == 2
        assert process.returncode is None
        assert running.used_blocks() > 0


async def test_ending_the_call_stops_the_request_on_the_workers(program: Program) -> None:
    async with slow() as running:
        done = await program.run(running.address, "cancel", "x")
        assert (done.code, done.status) == (1, CANCELLED)
        assert len(done.out) >= 3
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_cancel_by_id_prints_what_the_worker_confirmed(program: Program) -> None:
    async with slow() as running:
        done = await program.run(running.address, "stop", "x")
        # Of 16 tokens each: a busy machine asks later.
        assert re.search(r"^stopped STAGE_DECODE on d: [1-9]\d* blocks freed$", done.out, re.MULTILINE), done.out
        assert (done.code, done.status) == (1, CANCELLED)
        assert "reason CANCELLED" in done.err.splitlines()
        assert running.used_blocks() == 0


async def test_an_answer_that_takes_longer_than_its_deadline_is_ended(program: Program) -> None:
    async with slow() as running:
        done = await program.run(running.address, "deadline", "1", "x")
        assert (done.code, done.status) == (1, DEADLINE_EXCEEDED), done.err
        await eventually(lambda: running.used_blocks() == 0)


async def test_what_was_refused_for_lack_of_room_is_tried_again_when_the_server_says(program: Program) -> None:
    async with slow(max_running=1) as running, AsyncExitStack() as stack:
        call = running.stub.Generate(generate_pb2.GenerateRequest(prompt="x"))
        await call.read()
        process = await stack.enter_async_context(program.started(running.address, "retry", "x"))
        assert process.stderr is not None
        assert process.stdout is not None
        first = (await process.stderr.readline()).decode()
        assert re.fullmatch(r"again in 1\.[0-9]+ s: OVERLOADED\n", first)  # with RetryInfo of 1 s, and jitter
        call.cancel()
        assert await process.stdout.readexactly(1)


async def test_a_router_that_is_not_there_yet_is_tried_again(program: Program) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with program.started(listen, "retry", "x") as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert (await process.stderr.readline()).decode().startswith("again in ")
        async with slow(listen=listen):
            assert await process.stdout.readexactly(1)


@pytest.mark.parametrize("way", ["cut", "frozen"])
@pytest.mark.parametrize("program", [each for each in SELECTED if each in ("node", "go")], indirect=True)
async def test_an_answer_is_printed_without_a_gap_when_its_router_is_lost(program: Program, way: str) -> None:
    async with slow() as running, AsyncExitStack() as stack:
        other = await stack.enter_async_context(host_router(PATIENT, running.registry))
        await eventually(lambda: sum(not worker.problem for worker in other.cluster.workers) == 2)
        first = await stack.enter_async_context(TcpProxy(running.address))
        expected = await running.text_of(prompt="x", sampling={"temperature": 0}, stopping={"max_tokens": 120})
        process = await stack.enter_async_context(program.started(f"{first.address},{other.address}", "resume", "x"))
        assert process.stdout is not None
        begin = await process.stdout.readexactly(5)
        if way == "cut":
            await first.cut()
        else:
            first.freeze()
        rest = await process.stdout.readexactly(110)
        assert expected.startswith((begin + rest).decode())


async def test_an_error_is_printed_with_its_reason_and_its_fields(program: Program) -> None:
    async with slow() as running:
        done = await program.run(running.address, "errors")
        assert (done.code, done.status) == (1, INVALID_ARGUMENT)
        lines = done.err.splitlines()
        assert "reason INVALID_REQUEST" in lines
        assert "field sampling.temperature: must be at least 0, is -1" in lines
        assert any(line.startswith("field sampling.top_p: ") for line in lines)
