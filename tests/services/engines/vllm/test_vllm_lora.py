"""Adapters on vLLM: the ids of vLLM's own LoRARequest, and of the merged weights, also through handoffs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file
from support.cluster.in_process import Bench
from support.engines import vllm
from support.engines.adapters import save_adapter
from support.engines.checkpoints import PlainModel
from support.engines.engine_calls import collect, disaggregated, greedy
from support.eventually import eventually

from baton.errors import LoraNotHere
from baton.inference.v1 import lora_pb2, model_pb2
from engine_protocol.prefix_hash import block_hashes
from services.engines.kv_events import KvChanged
from services.engines.lora.inventory import ServesLoras
from services.engines.lora.peft_folder import read_peft_config, read_weights
from services.engines.prompt import Lora, Prompt, Sampling
from services.engines.vllm.engine import VllmEngine

pytestmark = [pytest.mark.requires_vllm, pytest.mark.usefixtures("end_of_vllm")]

IDS = tuple((7 * index * index + 3 * index + 11) % 300 + 10 for index in range(90))
SAMPLED = Sampling(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
WHOLE = {"routing": {"topology": "TOPOLOGY_AGGREGATED"}}


@pytest_asyncio.fixture
async def engines() -> AsyncIterator[tuple[VllmEngine, VllmEngine]]:
    with vllm.installed():
        async with vllm.SHARED.lend() as prefill, vllm.SHARED.lend() as decode:
            assert isinstance(prefill, VllmEngine)
            assert isinstance(decode, VllmEngine)
            yield prefill, decode
            await eventually(lambda: prefill.load().blocks_used == decode.load().blocks_used == 0)


def _folder(engine: VllmEngine) -> Path:
    return vllm.adapters_of(Path(engine.llm.vllm_config.model_config.model))


def _loras(engine: VllmEngine) -> ServesLoras:
    assert engine.loras is not None
    return engine.loras


def _lora(engine: VllmEngine, name: str) -> Lora:
    inventory = _loras(engine).inventory()
    return next(each.lora for each in (*inventory.loaded, *inventory.available) if each.lora.name == name)


async def _vllm_alone(engine: VllmEngine, name: str, sampling: Sampling) -> tuple[int, ...]:
    """vLLM's own answer, with a LoRARequest of the folder. It must have none of our adapters: they fill its places."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    own = LoRARequest(f"own-{name}", 9000 + len(name), str(_folder(engine) / name))
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        ignore_eos=True,
        detokenize=False,
    )
    async for output in engine.llm.generate({"prompt_token_ids": list(IDS)}, params, "own", lora_request=own):
        last = output
    await engine.llm.remove_lora(own.lora_int_id)
    return tuple(last.outputs[0].token_ids)


def _merged(checkpoint: Path, adapter: Path, target: Path) -> PlainModel:
    """The plain library's model with the adapter's product added to its weights."""
    weights = load_file(checkpoint / "model.safetensors")
    for module, pair in read_weights(adapter, read_peft_config(adapter, 8)).items():
        weights[f"{module}.weight"] += pair.up @ pair.down
    target.mkdir()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text((checkpoint / "config.json").read_text())
    return PlainModel(target)


@pytest.mark.parametrize("sampling", [greedy(12), SAMPLED], ids=["greedy", "seeded"])
async def test_ids_are_those_of_vllms_own_lora_request_on_one_engine_and_on_two(
    engines: tuple[VllmEngine, VllmEngine], sampling: Sampling
) -> None:
    prefill, decode = engines
    loras = _loras(decode)
    for each in loras.inventory().loaded:
        await loras.unload(each.lora.name)
    expected = {name: await _vllm_alone(decode, name, sampling) for name in ("first", "second")}
    for name in vllm.ADAPTERS:
        await loras.load(name)
    plain = (await collect(decode.decode(Prompt(IDS), sampling))).ids
    for name, own in expected.items():
        lora = _lora(decode, name)
        prompt = Prompt(IDS, lora=lora)
        async with _loras(prefill).use(lora), loras.use(lora):
            whole = (await collect(decode.decode(prompt, sampling))).ids
            assert await disaggregated(prefill, decode, prompt, sampling) == whole[1:]
        assert whole == own != plain


async def test_ids_are_those_of_the_merged_weights(engines: tuple[VllmEngine, VllmEngine], tmp_path: Path) -> None:
    _, decode = engines
    checkpoint = _folder(decode).parent
    expected = _merged(checkpoint, _folder(decode) / "first", tmp_path / "merged").generate(IDS, 8)
    lora = _lora(decode, "first")
    async with _loras(decode).use(lora):
        assert (await collect(decode.decode(Prompt(IDS, lora=lora), greedy(8)))).ids == expected


async def test_adapters_in_one_batch_answer_as_alone(engines: tuple[VllmEngine, VllmEngine]) -> None:
    prefill, decode = engines
    loras = [_lora(decode, name) for name in ("first", "second")]
    prompts = [Prompt(IDS), *(Prompt(IDS, lora=lora) for lora in loras)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            for lora in loras:
                await stack.enter_async_context(_loras(engine).use(lora))
        alone = [(await collect(decode.decode(prompt, SAMPLED))).ids for prompt in prompts]
        together = [replace(prompt, cache_salt="together") for prompt in prompts]
        crowd = await asyncio.gather(*(disaggregated(prefill, decode, each, SAMPLED) for each in together * 2))
    assert crowd == [ids[1:] for ids in alone] * 2


async def test_blocks_of_an_adapter_are_reported_in_its_chain(engines: tuple[VllmEngine, VllmEngine]) -> None:
    _, decode = engines
    lora = _lora(decode, "second")
    prompt = Prompt(tuple(range(20, 90)), cache_salt="lora", lora=lora)
    wanted = set(block_hashes(prompt.token_ids, vllm.BLOCK_TOKENS, "lora", lora=prompt.chain_seed))
    reported: set[bytes] = set()
    async with aclosing(decode.kv_changes()) as changes, _loras(decode).use(lora):
        await anext(changes)
        await collect(decode.decode(prompt, greedy(2)))
        async for change in changes:
            assert isinstance(change, KvChanged)
            reported.update(change.stored)
            if wanted <= reported:
                break


def _ask(**fields: object) -> dict[str, object]:
    stopping = {"max_tokens": 10, "ignore_eos": True}
    return {"token_ids": {"ids": IDS}, "sampling": {"temperature": 0.8, "seed": 7}, "stopping": stopping, **fields}


@pytest.mark.feature("LoRA adapters", engine="vllm", facade="grpc")
async def test_an_adapter_over_two_workers_answers_as_on_one_and_is_a_model(pair: Bench) -> None:
    await eventually(lambda: all(one.loras.is_reported for one in pair.cluster.workers))
    plain = await pair.generate(**_ask())
    apart = await pair.generate(**_ask(lora_name="first"))
    whole = await pair.generate(**_ask(lora_name="first"), **WHOLE)
    assert (apart.placed, whole.placed) == (("p1", "d1"), ("", "d1"))
    assert apart.token_ids == whole.token_ids != plain.token_ids
    models = (await pair.stub.ListModels(model_pb2.ListModelsRequest())).models
    base = next(each.name for each in models if not each.parent)
    assert [each.name for each in models if each.parent == base] == [f"{base}:{name}" for name in vllm.ADAPTERS]
    assert all(each.capabilities.lora for each in models)


async def test_operators_reload_and_unload_adapters(pair: Bench) -> None:
    await eventually(lambda: all(one.loras.is_reported for one in pair.cluster.workers))
    engine = pair.workers["d1"].engines.engine
    assert isinstance(engine, VllmEngine)
    folder = _folder(engine)
    before = await pair.generate(**_ask(lora_name="third"))
    save_adapter(folder / "third", folder.parent, seed=50, rank=8)
    # The content that was loaded serves until an operator says otherwise.
    assert (await pair.generate(**_ask(lora_name="third"))).token_ids == before.token_ids
    await pair.operators.LoadLora(lora_pb2.LoadLoraRequest(name="third"))
    after = await pair.generate(**_ask(lora_name="third"))
    assert after.token_ids != before.token_ids
    assert after.token_ids == (await pair.generate(**_ask(lora_name="third"), **WHOLE)).token_ids
    await pair.operators.UnloadLora(lora_pb2.UnloadLoraRequest(name="third"))
    with pytest.raises(grpc.aio.AioRpcError, match=r"no worker of .* has the adapter 'third'"):
        await pair.generate(**_ask(lora_name="third"))
    listed = await pair.operators.ListLoras(lora_pb2.ListLorasRequest())
    assert all("third" not in [each.name for each in one.inventory.loaded] for one in listed.workers)
    await pair.operators.LoadLora(lora_pb2.LoadLoraRequest(name="third"))


async def test_an_adapter_that_does_not_fit_is_refused_and_harms_nothing(
    engines: tuple[VllmEngine, VllmEngine],
) -> None:
    _, decode = engines
    loras = _loras(decode)
    bad = save_adapter(_folder(decode) / "bad", _folder(decode).parent, seed=60)
    tensors = load_file(bad / "adapter_model.safetensors")
    narrow = {name: each[:, :-1].contiguous() if "lora_A" in name else each for name, each in tensors.items()}
    save_file(narrow, bad / "adapter_model.safetensors")
    try:
        await loras.refresh()
        with pytest.raises(LoraNotHere, match="do not fit"):
            async with loras.use(_lora(decode, "bad")):
                pass
    finally:
        for each in bad.iterdir():
            each.unlink()
        bad.rmdir()
        await loras.refresh()
    assert decode.healthy
    assert len((await collect(decode.decode(Prompt(IDS), greedy(2)))).ids) == 2
