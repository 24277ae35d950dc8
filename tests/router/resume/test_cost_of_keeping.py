"""The cost of keeping: nothing without it, and with it nothing for a token on the router and little on the worker."""

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from support.cluster.in_process import Bench, bench, simulated
from support.eventually import PATIENCE_SECONDS

from baton.inference.v1 import generate_pb2

_ROOT = Path(__file__).parents[3]
# What only tokens pass: the rest of the router has work of its own, such as health checks.
_COUNTED = tuple(f"{_ROOT}/{part}/" for part in ("router/stream", "router/text", "router/resume", "services/resume"))


def _request(tokens: int, *, keep: bool) -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest(
        request_id="same",
        prompt="what does it cost",
        stopping={"max_tokens": tokens, "ignore_eos": True},
        sampling={"seed": 3, "temperature": 0.7},
    )
    if keep:
        request.response.keep.seconds = 1
    return request


async def _messages(running: Bench, request: generate_pb2.GenerateRequest) -> list[generate_pb2.GenerateResponse]:
    return [message async for message in running.stub.Generate(request, timeout=PATIENCE_SECONDS)]


async def _calls(running: Bench, tokens: int, *, keep: bool) -> Counter[str]:
    """The calls of the project's own functions, by package, while an answer of so many tokens is given."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if name.startswith(_COUNTED):
                found[name.removeprefix(f"{_ROOT}/").split("/")[0]] += 1

    sys.setprofile(count)
    try:
        await _messages(running, _request(tokens, keep=keep))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


async def _fewest(running: Bench, tokens: int, *, keep: bool) -> Counter[str]:
    """Of several runs: a machine that is busy lets tokens come together, or late, which takes other ways."""
    runs = [await _calls(running, tokens, keep=keep) for _ in range(3)]
    return Counter({name: min(run[name] for run in runs) for name in ("router", "services")})


async def test_an_answer_that_is_not_kept_has_the_same_messages_but_for_the_handle() -> None:
    async with bench(simulated("worker", "prefill", "decode", decode_step_seconds=0.002), proxied=False) as running:
        plain = await _messages(running, _request(40, keep=False))
        kept = await _messages(running, _request(40, keep=True))
        assert kept[0].started.resumption.handle
        assert not plain[0].started.HasField("resumption")
        kept[0].started.ClearField("resumption")
        for messages in (plain, kept):
            messages[-1].finished.ClearField("timings")
            messages[-1].finished.usage.ClearField("cached_tokens")
        assert [one.SerializeToString() for one in plain] == [one.SerializeToString() for one in kept]
        assert all(len(worker.kept) == 1 for worker in running.workers.values())


async def test_a_token_makes_no_more_calls_in_the_router_and_few_on_the_worker() -> None:
    async with bench(simulated("worker", "prefill", "decode", decode_step_seconds=0.002), proxied=False) as running:
        await _calls(running, 50, keep=True)
        per_token = {}
        for keep in (False, True):
            few, many = await _fewest(running, 100, keep=keep), await _fewest(running, 300, keep=keep)
            per_token[keep] = {name: (many[name] - few[name]) / 200 for name in ("router", "services")}
        assert abs(per_token[True]["router"] - per_token[False]["router"]) < 0.5
        assert per_token[False]["services"] == 0
        assert per_token[True]["services"] < 8


async def test_a_kept_answer_takes_a_kibibyte_and_four_bytes_a_token() -> None:
    async with bench(simulated("worker", "prefill", "decode"), proxied=False) as running:
        await _messages(running, _request(500, keep=True))
        [worker] = running.workers.values()
        [stream] = worker.kept.streams
        assert stream.size < 1024 + 4 * 500
        assert stream.ids.itemsize * len(stream.ids) == 4 * 500
