"""Records cost nothing for a token, and nothing at all where they are off."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from support.cluster.in_process import simulated
from support.cluster.recorded import Recorded, recorded
from support.eventually import PATIENCE_SECONDS

from baton import records
from baton.connection.credentials import RECORDED
from baton.inference.v1 import generate_pb2
from router.config import RecordsConfig

_ROOT = Path(__file__).parents[3]
# What only tokens and records pass: the rest of the router has work of its own, such as health checks.
_COUNTED = {
    "tokens": (f"{_ROOT}/router/stream/", f"{_ROOT}/router/text/"),
    "records": (f"{_ROOT}/router/recording/", f"{_ROOT}/baton/records.py"),
}


async def _calls(running: Recorded, tokens: int) -> Counter[str]:
    """The calls of the project's own functions, by kind, while an answer of so many tokens is given and recorded."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            for kind, files in _COUNTED.items():
                found[kind] += frame.f_code.co_filename.startswith(files)

    request = generate_pb2.GenerateRequest(
        prompt="what does it cost", stopping={"max_tokens": tokens, "ignore_eos": True}, sampling={"seed": 3}
    )
    sys.setprofile(count)
    try:
        async for _ in running.stubs[0].Generate(request, timeout=PATIENCE_SECONDS, metadata=RECORDED):
            pass
        if (recorder := running.routers[0].path.recorder) is not None:
            await recorder.find("none", None)
    finally:
        sys.setprofile(None)
    return found


async def _growth(running: Recorded) -> Counter[str]:
    """The calls for 200 more tokens; the fewest of several runs, as a busy machine lets tokens come together."""
    await _calls(running, 50)
    few, many = [[await _calls(running, tokens) for _ in range(3)] for tokens in (100, 300)]
    return Counter({kind: min(run[kind] for run in many) - min(run[kind] for run in few) for kind in _COUNTED})


async def test_a_recorded_token_makes_no_more_calls_than_another() -> None:
    growth = {}
    for name, kept in (("off", RecordsConfig()), ("on", RecordsConfig(asked=True, failed=True, share=1.0))):
        worker = simulated("worker", "prefill", "decode", decode_step_seconds=0.002)
        async with recorded(worker, records=kept, routers=1) as running:
            growth[name] = await _growth(running)
            if name == "off":
                assert (await _calls(running, 100))["records"] == 0
    assert growth["off"]["tokens"] > 200
    assert abs(growth["on"]["tokens"] - growth["off"]["tokens"]) < 40
    # Each of the longer answer's digests, and what makes a message of them.
    assert growth["on"]["records"] < 40


def test_an_answer_has_few_digests_however_long_it_is() -> None:
    for tokens in (1, 16, 17, 1024, 1025, 100_000):
        each = records.tokens_a_digest(tokens)
        assert 1 <= len(records.digests(range(tokens), each)) <= 64
