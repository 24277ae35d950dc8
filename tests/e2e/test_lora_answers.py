"""Adapters through a real cluster: same ids as `peft`'s merged model, through handoffs, and what operators do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.clients.baton_command import Baton
from support.clients.kserve_call import infer, text_request
from support.clients.openai_api import client_of, openai_bench
from support.cluster.command_fixtures import baton, environment
from support.cluster.demo import demo_worker
from support.cluster.in_process import PATIENT, Bench, bench, running_stream
from support.engines.adapters import ATTENTION, merged, save_adapter
from support.engines.checkpoints import DEMO, PlainModel
from support.eventually import eventually

from baton.inference.v1 import generate_pb2, lora_pb2, model_pb2, sampling_pb2
from services.config import WorkerConfig

__all__ = ["baton", "environment"]

PROMPTS = ((1, 80, 311, 94), (1, 45, 212, 77, 300, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27))
TOKENS = 8
GREEDY = sampling_pb2.SamplingParams(temperature=0)
STOPPING = sampling_pb2.StoppingOptions(max_tokens=TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    save_adapter(folder / "first", DEMO, seed=1)
    save_adapter(folder / "second", DEMO, seed=2, rank=8, targets=ATTENTION)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, PlainModel]:
    return {"": PlainModel(DEMO), **{name: merged(DEMO, folder / name) for name in ("first", "second")}}


def worker(role: str, folder: Path, worker_id: str = "", **options: object) -> WorkerConfig:
    config = demo_worker(role)
    lora = {"folder": folder, "max_loaded": 2, **options}
    engine = config.engine.model_validate({**config.engine.model_dump(), "lora": lora})
    return config.model_copy(update={"engine": engine, "worker_id": worker_id or config.worker_id})


@asynccontextmanager
async def cluster(*configs: WorkerConfig) -> AsyncIterator[Bench]:
    async with bench(*configs, router=PATIENT) as running:
        await eventually(lambda: all(one.loras.is_reported for one in running.cluster.workers))
        yield running


async def ids_of(running: Bench, prompt: tuple[int, ...], lora: str, **fields: object) -> list[int]:
    stream = await running.generate(
        token_ids=generate_pb2.TokenIds(ids=prompt), lora_name=lora, sampling=GREEDY, stopping=STOPPING, **fields
    )
    return stream.token_ids


@pytest.mark.feature("LoRA adapters", engine="pytorch", facade="grpc")
async def test_ids_are_those_of_the_merged_model_through_a_handoff(folder: Path, plain: dict[str, PlainModel]) -> None:
    jobs = [(prompt, name) for prompt in PROMPTS for name in plain]
    async with cluster(worker("prefill", folder), worker("decode", folder)) as running:
        topology = generate_pb2.RoutingOptions(topology=generate_pb2.TOPOLOGY_DISAGGREGATED)
        found = await asyncio.gather(*(ids_of(running, *job, routing=topology) for job in jobs))
    expected = [list(plain[name].generate(prompt, TOKENS)) for prompt, name in jobs]
    assert found == expected
    assert len({tuple(ids) for ids in expected[:3]} | {tuple(ids) for ids in expected[3:]}) > 3


async def test_an_adapter_is_a_model_of_its_own_name(folder: Path, plain: dict[str, PlainModel]) -> None:
    async with cluster(worker("decode", folder)) as running:
        stream = await running.generate(
            model="demo:first", token_ids=generate_pb2.TokenIds(ids=PROMPTS[0]), sampling=GREEDY, stopping=STOPPING
        )
        models = (await running.stub.ListModels(model_pb2.ListModelsRequest())).models
        found = (await running.stub.GetModel(model_pb2.GetModelRequest(name="demo:second"))).model
    assert stream.token_ids == list(plain["first"].generate(PROMPTS[0], TOKENS))
    assert stream.started.model == "demo:first"
    assert [(one.name, one.parent) for one in models] == [("demo", ""), ("demo:first", "demo"), ("demo:second", "demo")]
    assert (found.lora.name, found.lora.rank, found.decode_workers) == ("second", 8, 1)
    assert found.capabilities.lora


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"lora_name": "third"}, "lora_name"), ({"model": "demo:first", "lora_name": "second"}, "lora_name")],
)
async def test_an_unknown_adapter_is_refused_by_its_field(folder: Path, fields: dict[str, str], field: str) -> None:
    async with cluster(worker("decode", folder)) as running:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.generate(prompt="hello", **fields)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await running.generate(prompt="hello", model="demo:third")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (refused.value.details() or "")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_worker_that_cannot_have_the_adapter_is_never_chosen(
    folder: Path, tmp_path: Path, plain: dict[str, PlainModel]
) -> None:
    save_adapter(tmp_path / "other", DEMO, seed=5)
    async with cluster(worker("decode", folder, "able"), worker("decode", tmp_path, "unable")) as running:
        for _ in range(4):
            stream = await running.generate(
                token_ids=generate_pb2.TokenIds(ids=PROMPTS[0]), lora_name="first", sampling=GREEDY, stopping=STOPPING
            )
            assert stream.finished.decode_worker_id == "able"
            assert stream.token_ids == list(plain["first"].generate(PROMPTS[0], TOKENS))


async def test_a_worker_that_has_loaded_the_adapter_is_preferred(folder: Path) -> None:
    configs = worker("decode", folder, "cold"), worker("decode", folder, "warm", load=("first",))
    async with cluster(*configs) as running:
        for _ in range(4):
            stream = await running.generate(
                token_ids=generate_pb2.TokenIds(ids=PROMPTS[0]), lora_name="first", stopping=STOPPING
            )
            assert stream.finished.decode_worker_id == "warm"


async def test_operators_load_reload_and_unload(tmp_path: Path) -> None:
    changed = save_adapter(tmp_path / "changed" / "one", DEMO, seed=7)
    expected = list(merged(DEMO, changed).generate(PROMPTS[1], TOKENS))
    folder = tmp_path / "adapters"
    save_adapter(folder / "one", DEMO, seed=1)
    async with cluster(worker("decode", folder)) as running:
        before = await ids_of(running, PROMPTS[1], "one")
        save_adapter(folder / "one", DEMO, seed=7)
        assert await ids_of(running, PROMPTS[1], "one") == before
        loaded = await running.operators.LoadLora(lora_pb2.LoadLoraRequest(name="one"))
        [state] = loaded.workers
        assert [adapter.name for adapter in state.inventory.loaded] == ["one"]
        assert await ids_of(running, PROMPTS[1], "one") == expected != before
        await running.operators.UnloadLora(lora_pb2.UnloadLoraRequest(name="one"))
        with pytest.raises(grpc.aio.AioRpcError, match="no worker of demo has the adapter 'one'"):
            await ids_of(running, PROMPTS[1], "one")
        listed = await running.operators.ListLoras(lora_pb2.ListLorasRequest())
        assert not listed.workers[0].inventory.loaded


async def test_an_answer_goes_on_with_its_adapter_where_a_worker_is_lost(folder: Path) -> None:
    request = {
        "token_ids": generate_pb2.TokenIds(ids=PROMPTS[0]),
        "lora_name": "first",
        "sampling": GREEDY,
        "stopping": sampling_pb2.StoppingOptions(max_tokens=60, ignore_eos=True),
    }
    decoders = worker("decode", folder, "d1"), worker("decode", folder, "d2")
    async with cluster(worker("prefill", folder), *decoders) as running:
        undisturbed = await running.generate(**request)
        async with running_stream(running, 3, **request) as task:
            lost = next(name for name in ("d1", "d2") if running.workers[name].engines.load().running)
            await running.proxies[lost].cut()
            stream = await task
    assert stream.token_ids == undisturbed.token_ids
    assert (stream.finished.migrations, stream.finished.decode_worker_id) == (1, {"d1": "d2", "d2": "d1"}[lost])


@pytest.mark.feature("LoRA adapters", engine="pytorch", facade="openai")
@pytest.mark.feature("LoRA adapters", engine="pytorch", facade="kserve")
async def test_programs_and_operators_see_adapters(folder: Path, baton: Baton) -> None:
    async with openai_bench(worker("decode", folder, load=("second",))) as running:
        await eventually(lambda: all(one.loras.is_reported for one in running.cluster.workers))
        async with client_of(running) as client:
            listed = {model.id: getattr(model, "parent", "") async for model in await client.models.list()}
            found = await client.models.retrieve("demo:first")
            answer = await client.completions.create(model="demo:first", prompt="hello", max_tokens=8, temperature=0)
            ids = await client.completions.create(
                model="demo:first", prompt=list(PROMPTS[0]), max_tokens=TOKENS, temperature=0
            )
        expected = await running.generate(
            model="demo:first", token_ids=generate_pb2.TokenIds(ids=PROMPTS[0]), sampling=GREEDY, stopping=STOPPING
        )
        request = text_request("hello", model="demo:first")
        request.parameters["max_tokens"].int64_param, request.parameters["temperature"].double_param = 8, 0.0
        tensors = await infer(running.address, request)
        shown = await baton("lora", "list", "--address", running.address)
        loaded = await baton("lora", "load", "first", "--address", running.address)
        unloaded = await baton("lora", "unload", "second", "--address", running.address)
        failed = await baton("lora", "load", "third", "--address", running.address)
    assert listed == {"demo": None, "demo:first": "demo", "demo:second": "demo"}
    assert (found.id, answer.model, tensors.model_name) == ("demo:first",) * 3
    assert tensors.raw_output_contents[0][4:].decode() == answer.choices[0].text
    assert ids.choices[0].text == expected.text
    assert [line.split()[1:3] for line in shown.lines[2:]] == [["first", "loaded"], ["second", "loaded"]]
    assert (loaded.code, unloaded.code, failed.code) == (0, 0, 2)
    assert "no adapter 'third' in the folder" in failed.err
    assert [line.split()[1:3] for line in unloaded.lines[2:]] == [["first", "loaded"]]


async def test_several_answers_with_an_adapter(folder: Path, plain: dict[str, PlainModel]) -> None:
    several = sampling_pb2.SamplingParams(temperature=0, n=3)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(cluster(worker("prefill", folder), worker("decode", folder)))
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=PROMPTS[1]), lora_name="second", sampling=several, stopping=STOPPING
        )
        answer = await running.stub.GenerateUnary(generate_pb2.GenerateUnaryRequest(request=request))
    expected = list(plain["second"].generate(PROMPTS[1], TOKENS))
    assert [list(one.token.token_ids) for one in answer.answers] == [expected] * 3
