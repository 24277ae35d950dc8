"""The calls to TensorRT-LLM from prefill to decode, and the handoffs that never reach it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from fake_tensorrt_llm.llm import FABRIC, RUNNING
from fake_tensorrt_llm.values import RequestError
from packaging.version import Version
from support.cluster.in_process import Bench, bench
from support.engines import trtllm
from support.engines.engine_calls import collect, fetch, greedy
from support.eventually import PATIENCE_SECONDS, eventually

from baton.calls import stream, unary
from baton.engine.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.errors import BatonError, ConfigError, EngineFailed, HandoffLost, InvalidRequest, Unsupported
from rpc.channels import open_channel
from runtime.aio import timeout
from runtime.telemetry.metrics import REGISTRY
from services.config import WorkerConfig
from services.engines.base import Engine
from services.engines.context import EngineContext
from services.engines.kv_transfer import EngineHeldKv, RemoteKv, TransfersKv
from services.engines.prompt import Prompt, Sampling
from services.engines.trtllm.config import EngineArguments, TrtllmConfig
from services.engines.trtllm.engine import TrtllmEngine
from services.engines.trtllm.model_facts import model_facts
from services.engines.trtllm.package import Package, open_package
from services.engines.trtllm.resolved_args import Environment, check

PROMPT = Prompt(tuple(range(10, 60)))
TRANSCEIVER = {"backend": "NIXL", "max_tokens_in_buffer": 256, "kv_transfer_timeout_ms": 1000}


@pytest_asyncio.fixture
async def engine(newest: None, checkpoint: Path) -> AsyncIterator[Engine]:
    async with trtllm.open_engine(checkpoint) as opened:
        yield opened


@pytest_asyncio.fixture
async def decoder(newest: None, checkpoint: Path) -> AsyncIterator[Engine]:
    async with trtllm.open_engine(checkpoint) as opened:
        yield opened


async def handed(engine: Engine, max_tokens: int = 9) -> tuple[EngineHeldKv, RemoteKv]:
    held = await engine.prefill(PROMPT, greedy(max_tokens))
    assert isinstance(held, EngineHeldKv)
    return held, RemoteKv(Prompt(PROMPT.token_ids, (held.first_token,)), held.num_tokens, held.engine_state)


def moves(engine: Engine) -> TransfersKv:
    assert engine.kv_transfer is not None
    return engine.kv_transfer


def aborts() -> float:
    return sum(
        REGISTRY.get_sample_value("baton_trtllm_aborts_total", {"when": when}) or 0.0
        for when in ("waiting", "decoding")
    )


async def test_a_request_is_never_aborted_while_its_kv_is_on_the_way(engine: Engine, decoder: Engine) -> None:
    _, source = await handed(engine, 150)
    RUNNING[1].fetch_seconds = 0.2
    taking = asyncio.create_task(moves(decoder).decode_remote(source, greedy(150)))
    await eventually(lambda: decoder.load().running == 1)
    before = aborts()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert aborts() == before
    await eventually(lambda: decoder.load().running == 0)
    assert aborts() == before + 1
    assert decoder.healthy


async def test_a_transfer_that_never_ends_is_given_up(engine: Engine, decoder: Engine) -> None:
    _, source = await handed(engine)
    RUNNING[1].fetch_seconds = 3600.0
    with pytest.raises(HandoffLost, match="did not arrive within"):
        async with timeout(50):
            await moves(decoder).decode_remote(source, greedy(9))


async def test_a_request_is_aborted_once(engine: Engine) -> None:
    before = aborts()
    one = engine.decode(PROMPT, greedy(150))
    await anext(one)
    await asyncio.gather(one.aclose())
    await one.aclose()
    assert aborts() == before + 1


@pytest.mark.parametrize(
    "change",
    [
        {"cache_transceiver_config": {**TRANSCEIVER, "backend": "UCX"}},
        {"cache_transceiver_config": {**TRANSCEIVER, "transceiver_runtime": "PYTHON"}},
        {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}},
        {"enable_lora": True},
        {"kv_cache_config": {"dtype": "fp8"}},
        {"kv_cache_config": {"tokens_per_block": 64}},
    ],
    ids=["backend", "runtime", "speculative", "lora", "dtype", "block size"],
)
def test_sides_that_do_not_fit_have_other_layouts(newest: None, checkpoint: Path, change: dict[str, object]) -> None:
    config, package = TrtllmConfig(model=checkpoint), open_package()
    base = {"max_seq_len": 256, "cache_transceiver_config": TRANSCEIVER}
    digests = [
        model_facts(config, EngineArguments.model_validate(args), package).layout.digest
        for args in (base, {**base, **change})
    ]
    assert digests[0] != digests[1]


def prefiller(checkpoint: Path, package: Package) -> TrtllmEngine:
    """An engine on a package from which a test may have removed something."""
    config = TrtllmConfig.model_validate(trtllm.settings(checkpoint))
    effective = check(config, Environment(("prefill",), package.version, gpus=2)).effective
    return TrtllmEngine(config, effective, package, EngineContext(node=int))


async def test_versions_that_cannot_hand_log_probabilities_over_refuse_them(checkpoint: Path) -> None:
    with trtllm.trtllm("1.2.0"):
        async with trtllm.open_engine(checkpoint) as engine:
            with pytest.raises(Unsupported, match="cannot hand log probabilities over"):
                await engine.prefill(PROMPT, replace(greedy(9), logprobs=1))
            await engine.prefill(PROMPT, greedy(1))


async def test_every_parameter_reaches_both_sides(engine: Engine, decoder: Engine) -> None:
    sampling = Sampling(
        max_tokens=9,
        min_tokens=4,
        stop_token_ids=frozenset({7}),
        ignore_eos=True,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        seed=11,
        logprobs=2,
    )
    held = await engine.prefill(PROMPT, sampling)
    assert isinstance(held, EngineHeldKv)
    stream_ = await fetch(held, moves(decoder), Prompt(PROMPT.token_ids, (held.first_token,)), sampling)
    await collect(stream_)
    first, second = RUNNING[0].asked[-1], RUNNING[1].asked[-1]
    same = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in (*same, "seed", "logprobs", "stop_token_ids", "ignore_eos"):
        assert getattr(first, name) == getattr(second, name) is not None
    assert (first.n, second.n, second.max_tokens, second.min_tokens) == (1, 1, 9, 4)
    assert (second.temperature, second.top_k, second.seed, second.repetition_penalty) == (0.7, 5, 11, 1.2)


async def test_a_parameter_that_a_version_does_not_know_is_refused(newest: None, checkpoint: Path) -> None:
    package = open_package()
    package = replace(package, sampling_arguments=package.sampling_arguments - {"min_p"})
    async with prefiller(checkpoint, package) as engine:
        with pytest.raises(Unsupported, match="cannot sample by min_p"):
            await engine.prefill(PROMPT, replace(greedy(9), min_p=0.2))


@pytest.mark.parametrize("error", [RequestError, ValueError, TypeError, AssertionError, NotImplementedError])
async def test_what_the_engine_refuses_of_a_request_is_the_clients_fault(
    engine: Engine, error: type[Exception]
) -> None:
    RUNNING[0].refuses = error("The prompt is not to my liking")
    with pytest.raises(InvalidRequest, match="not to my liking"):
        await engine.prefill(PROMPT, greedy(9))
    assert engine.healthy
    RUNNING[0].refuses = None
    assert len((await collect(engine.decode(PROMPT, greedy(3)))).ids) == 3


async def test_an_engine_that_is_shutting_down_refuses_for_good(engine: Engine) -> None:
    RUNNING[0].refuses = RuntimeError("LLM is shutting down")
    with pytest.raises(EngineFailed, match="shutting down"):
        await engine.prefill(PROMPT, greedy(9))
    assert not engine.healthy


async def test_a_call_that_the_version_does_not_take_is_not_the_clients_fault(engine: Engine) -> None:
    def generate_async(inputs: object, *, mood: str, **_: object) -> None:
        raise AssertionError((inputs, mood))

    RUNNING[0].generate_async = generate_async
    with pytest.raises(BatonError, match="missing a required argument: 'mood'") as failed:
        await engine.prefill(PROMPT, greedy(9))
    assert failed.value.reason == "ENGINE_FAILED"


def test_ids_are_made_by_either_signature_of_their_generator(newest: None) -> None:
    package = open_package()
    asked: list[int] = []

    def by_machine(machine_id: int) -> int:
        asked.append(machine_id)
        return 2**61

    sys.modules["tensorrt_llm.llmapi.disagg_utils"].get_global_disagg_request_id = by_machine  # type: ignore[attr-defined]
    assert package.new_handoff_id(700) == 2**61
    assert asked == [700]


def test_an_unknown_generator_of_ids_is_refused(newest: None) -> None:
    def by_something(something: int) -> int:
        return something

    sys.modules["tensorrt_llm.llmapi.disagg_utils"].get_global_disagg_request_id = by_something  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="something"):
        open_package().new_handoff_id(1)


def test_versions_are_compared_as_versions(newest: None) -> None:
    assert open_package().version == Version("1.3.0rc30")


async def test_what_it_prints_does_not_reach_standard_output(
    newest: None, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sys.modules["tensorrt_llm"].__getattr__ = _printing  # type: ignore[method-assign]
    del sys.modules["tensorrt_llm"].SamplingParams
    with pytest.raises(AttributeError):
        open_package()
    captured = capfd.readouterr()
    assert "hello" not in captured.out
    assert "hello" in captured.err


def _printing(name: str) -> object:
    print("hello")
    raise AttributeError(name)


def worker(worker_id: str, role: str, checkpoint: Path) -> WorkerConfig:
    engine = trtllm.settings(checkpoint, name="demo", node_id=1)
    leases = {"lease_seconds": trtllm.TRANSFER_SECONDS / 2}
    return WorkerConfig.model_validate(
        {"worker_id": worker_id, "roles": [role], "engine": engine, "handoff": leases, "drain_seconds": 0}
    )


@pytest_asyncio.fixture
async def pair(newest: None, checkpoint: Path) -> AsyncIterator[Bench]:
    async with bench(worker("p1", "prefill", checkpoint), worker("d1", "decode", checkpoint)) as running:
        yield running


async def test_the_engine_never_sees_a_handoff_that_its_owner_does_not_know(pair: Bench) -> None:
    prefiller, decoder = pair.workers["p1"], pair.workers["d1"]
    asked = RUNNING[1].requests
    async with open_channel(prefiller.address) as here, open_channel(decoder.address) as there:
        request = prefill_pb2.PrefillRequest(request_id="r", prompt={"token_ids": PROMPT.token_ids})
        request.sampling.stop.max_tokens = 9
        answer = await unary(prefill_pb2_grpc.PrefillServiceStub(here).Prefill(request, timeout=PATIENCE_SECONDS))
        forged = decode_pb2.DecodeRequest(
            request_id="r",
            prompt=request.prompt,
            handoff=answer.handoff,
            emitted=[answer.handoff.first_token.token_id],
            sampling=request.sampling,
        )
        forged.handoff.handoff_id = "guessed"
        with pytest.raises(HandoffLost):
            async for _ in stream(decode_pb2_grpc.DecodeServiceStub(there).Decode(forged, timeout=PATIENCE_SECONDS)):
                pass
    assert RUNNING[1].requests == asked
    assert len(FABRIC) == 1
