"""Routers killed with SIGKILL, paused and killed together with a worker, under running streams: nothing is lost."""

import asyncio
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from support.cluster.fleet import Fleet, FleetPlan, Node, fleet
from support.engines.adapters import save_adapter
from support.engines.checkpoints import DEMO
from support.engines.written_engine import HERMES_TEMPLATE
from support.faults.lost_routers import EventSources, Report, Streams, request_kinds
from support.images.demo_questions import questions
from support.servers.etcd import EtcdServer

from baton.inference.v1 import generate_pb2

_SIMULATED = "engine={kind: simulated, name: demo, num_blocks: 4096, block_bytes: 1024, decode_step_seconds: 0.01}"
_EMBEDDED = (
    "engine={kind: pytorch, model: models/demo, name: demo, device: cpu, threads: 1, kv_cache_bytes: 48MiB, "
    "lora: {folder: FOLDER, max_loaded: 2}}"
)
# Losses, each a second after the one before: a few in a sample.
_FULL = os.environ.get("BATON_FAULTS") == "full"
_LOSSES = 24 if _FULL else 3
_ROUTER = ("probe={interval_seconds: 0.3, timeout_seconds: 1.5, hung_seconds: 3}", "drain_seconds=1")
_SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]}'


_SEEDED: dict[str, object] = {"model": "demo", "temperature": 0.8, "seed": 11, "max_tokens": 60, "ignore_eos": True}
_MESSAGES = {"messages": [{"role": "user", "content": "Sort: pear apple"}]}
_BODIES: dict[str, tuple[str, dict[str, object]]] = {
    "chat": ("/chat/completions", {**_SEEDED, **_MESSAGES}),
    "three": ("/chat/completions", {**_SEEDED, **_MESSAGES, "n": 3, "stream_options": {"include_usage": True}}),
    "stop": ("/chat/completions", {**_SEEDED, **_MESSAGES, "stop": ["qz", "th", "e e"]}),
    "logprobs": ("/completions", {**_SEEDED, "prompt": "Sort: pear", "logprobs": 1}),
}


def _requests() -> dict[str, generate_pb2.GenerateRequest]:
    kinds = request_kinds("Sort: pear apple mango", 60)
    for name in ("rare_messages", "slow_reader"):
        kinds[name] = _like(kinds["seeded"])
    kinds["rare_messages"].response.min_tokens_per_message = 9
    kinds["slow_reader"].stopping.max_tokens = 200
    return kinds


def _requests_of_a_model() -> dict[str, generate_pb2.GenerateRequest]:
    """Those that need a model's grammars, templates, adapters or encoder, too."""
    kinds = _requests()
    for name in ("guided", "chat", "tools", "adapter", "image"):
        kinds[name] = _like(kinds["seeded"])
    kinds["guided"].guided.json_schema = _SCHEMA
    for name in ("chat", "tools"):
        kinds[name].chat.messages.add(role="user").parts.add(text="Sort: pear apple")
    kinds["tools"].chat.tools.add(name="sort", parameters=_SCHEMA)
    kinds["tools"].chat.tool_choice.is_required = True
    kinds["adapter"].lora_name = "first"
    [question] = questions(1, "lost routers")
    kinds["image"].prompt = question.exercise.prompt
    for file in question.files:
        kinds["image"].media.add(data=file)
    return kinds


def _like(request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateRequest:
    copied = generate_pb2.GenerateRequest()
    copied.CopyFrom(request)
    return copied


async def _orphans_end(running: Fleet) -> None:
    async def none_used() -> bool:
        return await running.blocks_used() == 0

    for _ in range(240):
        if await none_used():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{await running.blocks_used()} blocks are in use")


async def _lose_in_turn(routers: Sequence[Node], report: Report) -> None:
    """Kills one router and the other, and pauses every third time."""
    for number in range(_LOSSES):
        await asyncio.sleep(1.0)
        report.losses += 1
        router = routers[number % 2]
        if number % 3 == 2:
            router.pause()
            await asyncio.sleep(4.0)
            router.resume()
        else:
            router.kill()
            router.start()
            await router.serving()
    await asyncio.sleep(1.0)


@pytest.mark.timeout(500 if _FULL else 170)
async def test_clients_of_openais_streams_lose_nothing_either(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    worker = (_SIMULATED, "handoff.lease_seconds=2", "drain_seconds=1")
    plan = FleetPlan("lost-sse", shared_etcd.endpoint, worker, _ROUTER, prefill=1, decode=2, routers=2, openai=True)
    async with fleet(plan, tmp_path) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        sources = EventSources([node.openai for node in routers], _BODIES)
        await sources.learn()
        await sources.run(8, partial(_lose_in_turn, routers, sources.report))
        print(f"\nserver-sent events: {sources.report}")
        assert (sources.report.failed, sources.report.different) == ([], [])
        assert sources.report.resumed > 3
        await _orphans_end(running)


@pytest.mark.timeout(500 if _FULL else 170)
@pytest.mark.parametrize("engine", ["simulated", "embedded"] if _FULL else ["embedded"])
async def test_routers_that_are_killed_and_paused_lose_no_stream(
    engine: str, shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    is_embedded = engine == "embedded"
    worker = ("handoff.lease_seconds=2", "drain_seconds=1")
    if is_embedded:
        save_adapter(tmp_path / "adapters" / "first", DEMO, seed=1)
        template = tmp_path / "hermes.jinja"
        template.write_text(HERMES_TEMPLATE)
        engine_text = _EMBEDDED.replace("FOLDER", str(tmp_path / "adapters"))
        worker = (engine_text, f"chat_template={template}", *worker)
    else:
        worker = (_SIMULATED, *worker)
    encode = int(is_embedded)
    plan = FleetPlan(f"lost-{engine}", shared_etcd.endpoint, worker, _ROUTER, encode, prefill=1, decode=2, routers=2)
    async with fleet(plan, tmp_path) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        requests = _requests_of_a_model() if is_embedded else _requests()
        streams = Streams([node.direct for node in routers], requests, Report())
        await streams.learn()

        await streams.run(8, partial(_lose_in_turn, routers, streams.report))
        report = streams.report
        print(f"\n{engine}: {report}")
        assert (report.failed, report.different) == ([], [])
        assert report.resumed > 3
        await _orphans_end(running)


@pytest.mark.timeout(500 if _FULL else 170)
async def test_a_router_and_a_worker_killed_together_lose_no_stream(shared_etcd: EtcdServer, tmp_path: Path) -> None:
    worker = (_SIMULATED, "handoff.lease_seconds=2", "drain_seconds=1")
    plan = FleetPlan("lost-both", shared_etcd.endpoint, worker, _ROUTER, prefill=1, decode=2, routers=2)
    async with fleet(plan, tmp_path) as running:
        routers = [node for node in running.nodes.values() if node.role == "router"]
        streams = Streams([node.direct for node in routers], _requests(), Report())
        await streams.learn()

        async def lose() -> None:
            await asyncio.sleep(1.0)
            streams.report.losses += 1
            # At one moment: a router that outlives the worker goes on elsewhere, and is then adopted.
            for lost in (running.nodes["decode-1"], routers[0]):
                lost.signal(signal.SIGKILL)
            for lost in (running.nodes["decode-1"], routers[0]):
                lost.kill()
            await asyncio.sleep(6.0)
            running.nodes["decode-1"].start()
            routers[0].start()
            await running.nodes["decode-1"].serving()

        await streams.run(6, lose)
        report = streams.report
        print(f"\nrouter and worker: {report}")
        assert (report.failed, report.different) == ([], [])
        assert report.recomputed > 0
        await _orphans_end(running)
