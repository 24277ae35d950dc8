"""`baton record`, `baton replay` and `baton why` against a real router."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc.aio import AioRpcError
from support.clients.baton_command import Baton, Outcome
from support.cluster.in_process import DECODE, FAST_ROUTER, PREFILL, Bench, bench
from support.lifetimes import in_one_task

from baton.inference.v1 import generate_pb2
from router.config import RecordsConfig


@pytest.fixture
async def running() -> AsyncIterator[Bench]:
    records = RecordsConfig(asked=True, failed=True)
    async with in_one_task(bench(PREFILL, DECODE, router=FAST_ROUTER.model_copy(update={"records": records}))) as found:
        yield found


@pytest.fixture
async def bundle(baton: Baton, running: Bench, tmp_path: Path) -> tuple[str, Path]:
    """The id of a recorded request, and its bundle."""
    address = ("--address", running.address)
    sent = await baton("generate", "hello there", "--max-tokens", "40", "--seed", "3", "--record", *address)
    request_id = sent.err.split()[-1]
    written = await baton("record", request_id, "-o", "bundle.json", *address)
    assert written.out == f"bundle.json: 1 record of {request_id}\n"
    return request_id, tmp_path / "bundle.json"


async def _replay(baton: Baton, running: Bench, *words: str) -> Outcome:
    return await baton("replay", *words, "--address", running.address)


async def test_a_request_is_recorded_and_is_the_same_again(
    baton: Baton, running: Bench, bundle: tuple[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("hello there\n")
    replayed = await _replay(baton, running, "bundle.json", "--prompt-file", "prompt.txt")
    assert (replayed.code, replayed.lines[0]) == (0, f"equal: all 40 tokens of {bundle[0]}")


async def test_another_seed_is_named_by_the_tokens_of_which_one_differs(
    baton: Baton, running: Bench, bundle: tuple[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "prompt.json").write_text(json.dumps({"prompt": "hello there"}))
    content = json.loads(bundle[1].read_text())
    content["records"][0]["request"]["sampling"]["seed"] = "4"
    bundle[1].write_text(json.dumps(content))
    replayed = await _replay(baton, running, "bundle.json", "--prompt-file", "prompt.json")
    assert replayed.code == 1
    assert replayed.lines == [
        f"different: {bundle[0]}",
        "one of the tokens 0 to 15 differs",
        "different then:",
        "  the seed: 3, now 4",
    ]


@pytest.mark.usefixtures("bundle")
async def test_another_prompt_is_refused(baton: Baton, running: Bench, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("hello then")
    replayed = await _replay(baton, running, "bundle.json", "--prompt-file", "other.txt")
    assert (replayed.code, "the digest of prompt differs" in replayed.err) == (2, True)
    without = await _replay(baton, running, "bundle.json")
    assert (without.code, "--prompt-file: is needed" in without.err) == (2, True)


async def test_what_is_no_bundle_is_refused(baton: Baton, running: Bench, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.json", "missing.json"):
        replayed = await _replay(baton, running, name)
        assert (replayed.code, "BUNDLE" in replayed.err) == (2, True)


async def test_why_tells_where_the_time_went_and_what_was_decided(
    baton: Baton, running: Bench, bundle: tuple[str, Path]
) -> None:
    request_id, _ = bundle
    for words in ((request_id, "--address", running.address), ("--bundle", "bundle.json")):
        page = await baton("why", *words)
        assert page.code == 0
        assert f"{request_id}: 11 prompt tokens for the default model, 40 tokens of answer. It arrived at " in page.out
        assert "It completed; the answer ended by length." in page.out
        assert "The longest stage was " in page.out
        assert "the policy least_loaded chose prefill on p1, decode on d1, of 2 workers." in page.out
        assert "load at that moment: p1 0 requests, 0 waiting tokens; d1 0 requests, 0 waiting tokens" in page.out
        assert "prefill on p1 (simulated): OK after " in page.out
        assert "holds 1 blocks of KV, 4096 bytes." in page.out
        assert "tokens 1 to 39, took over 4096 bytes by shm in " in page.out


async def test_why_tells_what_failed(baton: Baton, running: Bench) -> None:
    await running.stop("d1")
    await running.stop("p1")
    request = generate_pb2.GenerateRequest(prompt="hello", request_id="failed")
    with pytest.raises(AioRpcError):
        async for _ in running.stub.Generate(request, timeout=60):
            pass
    page = await baton("why", "failed", "--address", running.address)
    assert page.code == 0
    assert "recorded it because it failed." in page.out
    assert "It ended with NO_WORKER" in page.out
    assert "It was not sent to any worker." in page.out


async def test_what_a_newer_router_or_a_stranger_has_written_is_read(baton: Baton, tmp_path: Path) -> None:
    stage = {"stage": 77, "duration": "-5s", "worker_id": "\u001b[2Jred", "transport": "\u001b]0;x", "num_bytes": "1"}
    attempt = {"call": "decode", "worker_id": ":fire:", "outcome": "[/x]", "error": "\u001b[31m"}
    placement = {"cache_view": 77, "candidates": [{"total_seconds": "NaN"}]}
    record = {
        "request_id": "a\nb",
        "cause": 77,
        "outcome": "OK",
        "arrived": "0001-01-01T00:00:00Z",
        "finished": {"reason": 77, "topology": 77, "timings": [stage]},
        "answers": [{"index": 4000000000, "attempts": [attempt], "placements": [placement]}],
    }
    (tmp_path / "strange.json").write_text(json.dumps({"version": 1, "records": [record]}))
    page = await baton("why", "--bundle", "strange.json")
    assert (page.code, page.err) == (0, "")
    assert "\x1b" not in page.out
    for text in (
        "a\N{REPLACEMENT CHARACTER}b: ",
        "a cause that this version does not know",
        ":fire:",
        "[/x]",
        "unknown",
    ):
        assert text in page.out


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ids.txt", "9" * 5000),
        ("deep.json", '{"chat": {"template_variables": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}}"),
        ("none.json", '{"prompt": -1}'),
    ],
)
async def test_a_prompt_file_that_is_none_is_refused(
    baton: Baton, running: Bench, tmp_path: Path, name: str, text: str
) -> None:
    content = json.loads((tmp_path / "bundle.json").read_text())
    content["records"][0]["redacted"] = ["token_ids"]
    (tmp_path / "bundle.json").write_text(json.dumps(content))
    (tmp_path / name).write_text(text)
    replayed = await _replay(baton, running, "bundle.json", "--prompt-file", name)
    assert (replayed.code, replayed.out, "--prompt-file: " in replayed.err) == (2, "", True)


@pytest.mark.usefixtures("bundle")
async def test_a_bundle_that_was_cut_is_not_equal_to_anything(baton: Baton, running: Bench, tmp_path: Path) -> None:
    file = tmp_path / "bundle.json"
    (tmp_path / "prompt.txt").write_text("hello there")
    whole = file.read_text()
    content = json.loads(whole)
    del content["records"][0]["answers"][0]["digests"]
    for text in (json.dumps(content), whole[: len(whole) // 2], whole + "}"):
        file.write_text(text)
        replayed = await _replay(baton, running, "bundle.json", "--prompt-file", "prompt.txt")
        assert (replayed.code, "BUNDLE" in replayed.err) == (2, True)


async def test_why_needs_a_request(baton: Baton, running: Bench) -> None:
    assert (await baton("why", "--address", running.address)).code == 2
    unknown = await baton("why", "unknown", "--address", running.address)
    assert (unknown.code, "REQUEST_NOT_FOUND" in unknown.err) == (1, True)
