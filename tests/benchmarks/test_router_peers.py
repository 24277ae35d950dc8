"""`make bench-router`: its clients, its engines and its page, without the other projects' routers."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import numpy
import pytest

from benchmarks.peers.clients.grpc_client import GrpcClient, WorkersClient
from benchmarks.peers.clients.http_client import HttpClient
from benchmarks.peers.clients.load import FLAT, HALF, PACED, Answer, Load, LoadClient, steady
from benchmarks.peers.clients.steps import since_steps
from benchmarks.peers.compare import Comparison, candidates, parse, plans
from benchmarks.peers.cores import Cores
from benchmarks.peers.environments import COMPILED, DYNAMO, HTTP, checkout_hash, install_compiled
from benchmarks.peers.measure import LaterTokens, LoadPlan, Measured, Sample, Spread
from benchmarks.peers.report import Run, plot, ratio, report
from benchmarks.peers.routers import EACH, EIGHT, PEERS, Baton, Bench, Router, baton, engines
from benchmarks.peers.workers import workers
from cli.local.ports import free_port

CORES = Cores(*[frozenset(os.sched_getaffinity(0))] * 2)


def bench(folder: Path) -> Bench:
    return Bench(folder, CORES, folder / "log", (), "", (1, 2), folder / "baton-steps", folder / "http-steps")


def sample(microseconds: float, first: float, since_step: float, direct: float) -> Sample:
    later = LaterTokens(Spread(33.0, 66.0), 2.0, Spread(since_step, 9.0), Spread(direct, 5.0))
    return Sample(microseconds, 5.0, 0.2, 0.6, 1.0, Spread(first, 9.0), later)


def measured(router: Router, **loads: Sequence[Sample]) -> Measured:
    plans = {"paced": LoadPlan(PACED, 64), "half": LoadPlan(HALF, 1024, is_steady=True)}
    return Measured(router, {plans[name]: dict(enumerate(samples)) for name, samples in loads.items()})


def a_run(*others: Measured) -> Run:
    steps = Path("steps")
    own = measured(
        Router("Baton (http2)", 1, {}, steps, runs="CPython 3.11 with PGO, no compiled modules"),
        paced=[sample(40.0, 2.5, 1.5, 1.0), sample(44.0, 2.5, 1.5, 1.0)],
        half=[sample(30.0, 3.0, 2.0, 1.0)],
    )
    direct = measured(Router("no router", None, {}, steps), paced=[sample(0.0, 1.0, 1.0, 1.0)] * 2)
    return Run([own, *others, direct], ["Dynamo: no Python 3.10"], "the router on core 1", "compare", 0.5, 2, 1)


def test_the_page_holds_baton_to_its_bars() -> None:
    vllm = measured(Router("vllm-router", 2, {}, Path("other")), paced=[sample(50.0, 1, 1, 1), sample(40.0, 1, 1, 1)])
    page = report(a_run(vllm))
    assert "| Baton (http2) | CPU of a token, 64 streams paced, to vllm-router's | 0.95 | 1 | yes |" in page
    assert "| Baton (http2) | added to TTFT p50 at 64 streams paced, ms | 1.50 | 1 | **no** |" in page
    assert "| Baton (http2) | added to a later token's p50 at 64 streams paced, ms | 0.50 | 0.3 | **no** |" in page
    assert "| Baton (http2) | ITL p99 to p50 of 1,024 streams at half the pace, steady | 2.00 | 3 | yes |" in page


def test_the_page_names_what_ran_and_what_is_left_out() -> None:
    smg = measured(Router("smg", 2, {}, Path("other"), version="1.13.0"), paced=[sample(50.0, 1, 1, 1)] * 2)
    page = report(a_run(smg))
    assert "- Baton (http2): CPython 3.11 with PGO, no compiled modules." in page
    assert "- Left out: Dynamo: no Python 3.10." in page
    assert "From PyPI: smg 1.13.0." in page
    # Each figure has the version that it is of.
    assert "| a token, 64 streams paced | smg 1.13.0 | 50.0 |" in page
    assert "to vllm-router's" not in page


def test_a_ratio_is_of_the_rounds_that_both_have() -> None:
    one = measured(Router("a", 1, {}, None), paced=[sample(10.0, 1, 1, 1), sample(30.0, 1, 1, 1)])
    other = measured(Router("b", 2, {}, None), paced=[sample(20.0, 1, 1, 1)])
    assert ratio(one, other, LoadPlan(PACED, 64)) == 0.5
    assert ratio(one, other, LoadPlan(FLAT, 64)) is None


def test_the_plot_has_a_bar_for_each_router() -> None:
    drawn = plot(a_run())
    assert "Baton (http2)" in drawn
    assert "no router" not in drawn


def test_an_arrival_is_compared_with_the_step_before_it(tmp_path: Path) -> None:
    numpy.array([1.0, 2.0]).tofile(tmp_path / "steps")
    assert since_steps(tmp_path / "steps", numpy.array([0.5, 1.25, 2.75])) == pytest.approx([0.25, 0.75])


def test_what_comes_after_the_last_token_is_no_token() -> None:
    answer = Answer(3, started=1.0)
    for now, tokens in ((2.0, 1), (3.5, 5), (4.0, 1)):
        answer.note(now, tokens)
    load = Load([answer], 3.0)
    assert (load.tokens, load.messages) == (3, 2)
    assert load.first_token_seconds() == pytest.approx([1.0])
    assert load.intervals() == pytest.approx([1.5])


def test_the_latencies_of_a_load_are_those_of_its_time() -> None:
    early, late = Answer(3, started=1.0), Answer(3, started=4.0)
    for answer, times in ((early, (2.0, 4.5, 6.0)), (late, (5.0, 6.5, 9.0))):
        for now in times:
            answer.note(now, 1)
    load = Load([early, late], 9.0, begin=4.0, end=7.0)
    assert load.first_token_seconds() == pytest.approx([1.0])
    assert load.intervals() == pytest.approx([2.5, 1.5, 1.5])
    assert load.later_arrivals() == pytest.approx([4.5, 6.0, 6.5])
    assert load.tokens == 6


async def test_in_a_steady_load_one_stream_follows_another(tmp_path: Path) -> None:
    ports = (free_port(), free_port())
    async with engines(ports, tmp_path / "steps", tmp_path / "log", CORES):
        client = HttpClient(ports[1])
        load = await steady(client, FLAT, 3)
        client.close()
    lanes = [load.answers[index : index + 2] for index in (0, 2, 4)]
    assert len(load.answers) == 6
    assert all(first.arrivals[-1] <= second.started for first, second in lanes)
    assert load.begin == max(first.started for first, _ in lanes)
    assert load.end == min(second.arrivals[-1] for _, second in lanes)


def test_options_choose_the_loads_and_the_rows(tmp_path: Path) -> None:
    words = ["--streams", "64", "--half", "1024", "--ways", EACH, "--way-streams", "8", "--grpcio"]
    options = parse([*words, "--beside", "Wheel=/a/python", "--folder", str(tmp_path)])
    assert [str(plan) for plan in plans(options, 0)] == [
        "a request of 1 token",
        "a token, 64 streams paced",
        "a token, 64 streams flat out",
        "a token, 1,024 streams at half the pace",
        "a token, 1,024 streams at half the pace, steady",
        f"a token, 8 streams paced, {EACH}",
        f"a token, 8 streams flat out, {EACH}",
    ]
    assert len(list(plans(options, 1))) == 5
    assert list(candidates(options)) == [
        Baton("Baton (http2)", "http2", sys.executable),
        Baton("Baton (grpcio)", "grpcio", sys.executable),
        Baton("Wheel", "http2", "/a/python", is_installed=True),
    ]


def test_where_baton_is_compiled_both_rows_run_on_that_interpreter(tmp_path: Path) -> None:
    built = tmp_path / COMPILED.name / "built"
    built.parent.mkdir()
    built.write_text("of other code")
    python = str(COMPILED.python(tmp_path))
    named = ["--folder", str(tmp_path)]
    assert [each.name for each in candidates(parse(named))] == ["Baton (http2)"]
    built.write_text(checkout_hash())
    assert list(candidates(parse(named))) == [
        Baton("Baton (http2)", "http2", python),
        Baton("Baton (http2, compiled)", "http2", python, is_installed=True),
    ]
    assert [each.name for each in candidates(parse([*named, "--no-compiled"]))] == ["Baton (http2)"]
    assert next(candidates(parse([*named, "--python", "/a/python"]))).python == "/a/python"


def test_without_a_c_compiler_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    install_compiled(tmp_path)
    assert capsys.readouterr().out == "The compiled Baton is left out: no C compiler was found\n"
    assert list(tmp_path.iterdir()) == []


async def test_a_router_that_is_not_installed_is_an_error_of_its_own(tmp_path: Path) -> None:
    assert not HTTP.is_complete(tmp_path)
    assert not DYNAMO.is_complete(tmp_path)
    with pytest.raises(OSError, match="not installed"):
        async with PEERS["smg"](bench(tmp_path), ()):
            pass


async def test_a_stream_from_the_http_engine_has_all_its_tokens(tmp_path: Path) -> None:
    ports, steps = (free_port(), free_port()), tmp_path / "steps"
    async with engines(ports, steps, tmp_path / "log", CORES):
        client = HttpClient(ports[1])
        answers = await asyncio.gather(client.answer(PACED, 4), client.answer(FLAT, 40), client.answer(FLAT, 1))
        again = await client.answer(PACED, 3)
        client.close()
    assert [answer.tokens for answer in (*answers, again)] == [4, 40, 1, 3]
    assert len(again.arrivals) <= 3
    assert len(since_steps(steps, Load([again], 1.0).later_arrivals())) == len(again.arrivals) - 1


async def test_batons_router_serves_each_client_on_any_interpreter(tmp_path: Path) -> None:
    async with workers(tmp_path / "steps") as (records, _, spans):
        shared = Bench(tmp_path, CORES, tmp_path / "log", records, spans, (1, 2), tmp_path / "steps", tmp_path / "none")
        direct: LoadClient = WorkersClient(shared.workers)
        async with baton(shared, Baton("Baton", "http2"), [EACH]) as router:
            asked = (router.clients[EIGHT], router.clients[EACH], direct)
            answers = [await client.answer(PACED, 4) for client in asked]
        direct.close()
    assert "PGO" in router.runs
    assert [answer.tokens for answer in answers] == [4, 4, 4]
    for answer in answers:
        later = Load([answer], 1.0).later_arrivals()
        assert len(since_steps(tmp_path / "steps", later)) == len(later)


async def test_a_call_that_fails_says_its_status() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcClient(f"127.0.0.1:{port}")
    with pytest.raises(ConnectionError, match="status b'12'"):
        await client.answer(PACED, 1)
    client.close()
    await server.stop(0)


class _Endless(Measured):
    """A router that serves its first rounds, and then hangs; `hangs` is set by then."""

    def __init__(self, hangs: asyncio.Event) -> None:
        super().__init__(Router("Baton (http2)", 1, {}, Path("steps")))
        self._hangs = hangs

    async def measure(self, plan: LoadPlan, number: int, cores: Cores) -> None:
        self.samples.setdefault(plan, {})[number] = sample(40.0 + number, 2.5, 1.5, 1.0)
        if number == 2 and plan.number:
            self._hangs.set()
            await asyncio.sleep(60)


async def test_rounds_that_are_finished_are_there_after_a_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison, hangs = Comparison(parse(["--rounds", "5", "--streams", "64"]), CORES), asyncio.Event()
    comparison.measured.append(_Endless(hangs))

    async def started(self: Comparison, stack: AsyncExitStack) -> list[Router]:
        return []

    monkeypatch.setattr(Comparison, "_start", started)
    running = asyncio.create_task(comparison.run())
    await hangs.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert comparison.finished_rounds == 2
    [one] = comparison.measured
    assert all(list(rounds) in ([0, 1], [0]) for rounds in one.samples.values())
    run = Run(comparison.measured, [], "the router on core 1", "compare", 0.5, comparison.finished_rounds, 1)
    assert "2 rounds, each with all routers" in report(run)
