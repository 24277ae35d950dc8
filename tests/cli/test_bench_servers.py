"""`baton bench` over HTTP, beside other servers, and with images."""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.clients.baton_command import Baton
from support.clients.openai_api import OPENAI_ROUTER, openai_bench
from support.cluster.demo import demo_worker
from support.cluster.in_process import simulated

from cli.local.ports import free_port
from router.config import OpenAIConfig

LOAD = ("--requests", "6", "--isl", "100", "--osl", "5", "--concurrency", "2")
DONE = "data: [DONE]\n\n"


def workers(**engine: object) -> list[object]:
    costs: dict[str, object] = {"block_bytes": 64, "max_context_tokens": 20_000, **engine}
    return [simulated("p1", "prefill", **costs), simulated("d1", "decode", **costs)]


def written(path: Path) -> list[dict[str, object]]:
    content = json.loads(path.read_text())
    found: list[dict[str, object]] = content["steps"] if "steps" in content else content["rows"]
    return found


@asynccontextmanager
async def answering(*answers: str) -> AsyncIterator[str]:
    """The URL of a server that lists the model `other`, and answers completions with these bodies in turn."""
    waiting = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(
                int(line[15:]) for line in head.decode().lower().split("\r\n") if line[:14] == "content-length"
            )
            await reader.readexactly(length)
            body = waiting.pop(0) if head.startswith(b"POST") else '{"data": [{"id": "other"}]}'
            status = "429 Too Many Requests" if body == "429" else "200 OK"
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


async def test_a_sweep_by_http_measures_the_same_engine_as_one_by_grpc(baton: Baton, tmp_path: Path) -> None:
    by = {"grpc": tmp_path / "grpc", "http": tmp_path / "http"}
    async with openai_bench(*workers(decode_step_seconds=0.05)) as running:
        urls = {"grpc": f"grpc://{running.address}", "http": f"http://{running.openai_address}"}
        # Other prompts than before, which are cached.
        for seed, (name, url) in enumerate(urls.items()):
            words = ("--warmup", "2", "--seed", str(1 + 10 * seed), "--json", str(by[name]))
            assert (await baton("bench", "sweep", "--url", url, *LOAD, *words)).code == 0
    for path in by.values():
        (step,) = written(path)
        assert (step["step"], step["requests"], step["failed"], step["short"]) == ("2 at once", 6, 0, 0)
        assert step["hit_rate"] == 0.0
        # Four steps after the first token, of which the first may have begun for the other request; a busy machine
        # adds to the whole, and may take from the gaps.
        assert step["whole"]["p50"] >= 3 * 0.05  # type: ignore[index]
        assert 0 < 4 * step["token"]["p99"] <= step["whole"]["p99"]  # type: ignore[index]


async def test_servers_are_compared_in_turns_with_ratios_to_the_first(baton: Baton, tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "json"), "--markdown", str(tmp_path / "markdown"))
    async with (
        openai_bench(*workers(decode_step_seconds=0.02)) as fast,
        openai_bench(*workers(decode_step_seconds=0.1)) as slow,
    ):
        urls = [f"http://{fast.openai_address}", f"grpc://{slow.address}"]
        words = (*LOAD, "--rounds", "2", *files, *(word for url in urls for word in ("--url", url)))
        outcome = await baton("bench", "compare", *words)
    assert outcome.code == 0
    rows = written(tmp_path / "json")
    assert [(row["step"], row["server"], len(row["rounds"])) for row in rows] == [  # type: ignore[arg-type]
        ("2 at once", url, 2) for url in urls
    ]
    assert (tmp_path / "markdown").read_text() == outcome.out
    (ratio,) = [line for line in outcome.lines if f"| {urls[1]} / {urls[0]} |" in line]
    rounds = [[each["token"]["p50"] for each in row["rounds"]] for row in rows]  # type: ignore[attr-defined]
    expected = statistics.median(slow / fast for fast, slow in zip(*rounds, strict=True))
    assert float(ratio.split(" | ")[6].split(" ")[0]) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("429", "HTTP 429"),
        ('data: {"choices": [{"text": "a"}]}\n\n', "ended early"),
        (f'data: {{"error": {{"code": "engine_failed", "message": "m"}}}}\n\n{DONE}', "engine_failed"),
    ],
    ids=["status", "cut-off", "in-the-stream"],
)
async def test_answers_of_a_server_that_are_no_answers_are_counted_by_their_errors(
    baton: Baton, tmp_path: Path, answer: str, error: str
) -> None:
    good = 'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [], "usage": {"completion_tokens": 2}}\n\n' + DONE
    async with answering(good, answer) as url:
        words = (
            "--url",
            url,
            "--requests",
            "2",
            "--concurrency",
            "1",
            "--output",
            "3",
            "--json",
            str(tmp_path / "json"),
        )
        outcome = await baton("bench", "sweep", *words)
    (step,) = written(tmp_path / "json")
    assert (step["failed"], step["errors"], step["short"]) == (1, {error: 1}, 1)
    assert "1 answers have fewer tokens than asked" in outcome.out
    assert outcome.code == 0


async def test_a_server_that_is_not_ready_yet_is_waited_for(baton: Baton) -> None:
    port = free_port()
    outcome = await baton("bench", "sweep", "--url", f"http://127.0.0.1:{port}", *LOAD, "--wait", "0.6")
    assert outcome.code == 1
    assert f"127.0.0.1:{port} lists no models" in outcome.err
    waiting = asyncio.ensure_future(baton("bench", "sweep", "--url", f"http://127.0.0.1:{port}", *LOAD, "--wait", "60"))
    await asyncio.sleep(0)
    async with openai_bench(
        *workers(), router=OPENAI_ROUTER.model_copy(update={"openai": OpenAIConfig(listen=f"127.0.0.1:{port}")})
    ):
        assert (await waiting).code == 0


async def test_a_mode_is_forced_by_grpc(baton: Baton, tmp_path: Path) -> None:
    """A worker that runs whole requests cannot be one half of a pair."""
    failed = {}
    async with openai_bench(simulated("d1", "decode", block_bytes=64)) as running:
        for mode in ("agg", "disagg"):
            words = (*LOAD, "--mode", mode, "--timeout", "2", "--json", str(tmp_path / mode))
            await baton("bench", "sweep", "--address", running.address, *words)
            (step,) = written(tmp_path / mode)
            failed[mode] = step["failed"]
    assert failed == {"agg": 0, "disagg": 6}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sweep", *LOAD, "--url", "ftp://x"), "is not a URL such as"),
        (("sweep", *LOAD, "--url", "http://127.0.0.1:99999"), "--url"),
        (("sweep", *LOAD, "--image-repeat", "2"), "is not between 0 and 1"),
        (("compare", *LOAD, "--url", "http://127.0.0.1:1"), "at least two different --url"),
        (("compare", *LOAD, *("--url", "http://127.0.0.1:1") * 2), "at least two different --url"),
    ],
)
async def test_options_of_servers_that_are_wrong_are_refused(baton: Baton, words: tuple[str, ...], said: str) -> None:
    outcome = await baton("bench", *words)
    assert outcome.code == 2
    assert said in outcome.err


async def test_images_are_sent_in_chats_by_both_ways_and_repeated_as_asked(baton: Baton, tmp_path: Path) -> None:
    images = ("--images", "2", "--image-size", "40:60", "--image-repeat", "0.5", "--isl", "20", "--osl", "3")
    async with openai_bench(*(demo_worker(role) for role in ("encode", "prefill", "decode"))) as running:
        for url in (f"grpc://{running.address}", f"http://{running.openai_address}"):
            words = (*images, "--requests", "4", "--concurrency", "2", "--json", str(tmp_path / "json"))
            outcome = await baton("bench", "sweep", "--url", url, *words)
            (step,) = written(tmp_path / "json")
            assert (step["requests"], step["failed"], step["errors"]) == (4, 0, {})
            assert outcome.code == 0
