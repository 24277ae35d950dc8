"""A disaggregated answer equals the plain model's: prefill, handoff and decode in separate processes."""

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from support.clients.generation import generate_all, greedy_ids
from support.cluster.fleet import PATIENT, Fleet, FleetPlan, overrides, shared_fleet
from support.engines.checkpoints import DEMO, PlainModel, save_llama, save_qwen3
from support.engines.device import DEVICE, ON_DEVICE
from support.servers.etcd import EtcdServer
from support.transports.nixl import INSTALLED

from baton.inference.v1 import generate_pb2 as pb
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub

# Many processes share two cores: slow is not wrong.
pytestmark = pytest.mark.timeout(400)

MAX_TOKENS = 24

# A pool in a GPU's memory is offered by cuda_ipc, and not by shm.
NEAR = "shm" if DEVICE == "cpu" else "cuda_ipc"


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster, and the plain model that it must agree with."""

    fleet: Fleet
    plain: PlainModel
    transport: str


@pytest.fixture(
    scope="module",
    params=[
        ("demo", NEAR),
        ("llama", "nixl" if INSTALLED and DEVICE == "cpu" else NEAR),
        ("qwen3", "tcp"),
    ],
    ids=lambda param: "-".join(param),
)
def served(
    request: pytest.FixtureRequest, shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model, transport = request.param
    folder = tmp_path_factory.mktemp(f"{model}-{transport}")
    path = _checkpoint(model, folder)
    engine = {
        **ON_DEVICE,
        "kind": "pytorch",
        "model": path,
        "name": model,
        "threads": 1,
        "kv_cache_bytes": 256 << 20,
    }
    plan = FleetPlan(
        namespace=f"same-{model}-{transport}",
        etcd=shared_etcd.endpoint,
        worker=(*overrides("engine", engine), f"transports=[{transport}]"),
        router=(PATIENT,),
        prefill=1,
        decode=1,
    )
    with shared_fleet(plan, folder) as running:
        yield Served(running, PlainModel(path), transport)


@pytest_asyncio.fixture
async def stub(served: Served) -> AsyncIterator[InferenceServiceStub]:
    async with grpc.aio.insecure_channel(served.fleet.router.address) as channel:
        yield InferenceServiceStub(channel)


def _checkpoint(model: str, folder: Path) -> Path:
    match model:
        case "llama":
            return save_llama(folder / "model")
        case "qwen3":
            return save_qwen3(folder / "model")
        case _:
            return DEMO


def _prompts(vocab_size: int) -> list[list[int]]:
    """54 prompts of 1 to 1,500 tokens; the short ones share their beginnings, so that caches have something to hit."""
    rng = random.Random(7)
    shared = [rng.randrange(10, vocab_size) for _ in range(64)]
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 100, 257, 700, 1500] + [rng.randrange(3, 300) for _ in range(42)]
    return [
        (shared[: length // 2] if length < 128 else []) + [rng.randrange(10, vocab_size) for _ in range(length)]
        for length in lengths
    ]


def _requests(prompts: Sequence[Sequence[int]]) -> list[pb.GenerateRequest]:
    return [greedy_ids(prompt, MAX_TOKENS) for prompt in prompts]


@pytest.mark.feature("the ids of transformers' own generate", engine="pytorch", facade="grpc")
async def test_greedy_ids_equal_the_plain_models_alone_and_together_and_from_the_cache(
    served: Served, stub: InferenceServiceStub
) -> None:
    prompts = [prompt[:1500] for prompt in _prompts(served.plain.vocab_size)]
    expected = [served.plain.generate(prompt, MAX_TOKENS) for prompt in prompts]

    alone = await generate_all(stub, _requests(prompts), at_once=1)
    together = await generate_all(stub, _requests(prompts), at_once=32)

    assert [answer.ids for answer in alone] == expected
    assert [answer.ids for answer in together] == expected
    assert all(
        answer.finished.topology == pb.TOPOLOGY_DISAGGREGATED for answer in alone + together if len(answer.ids) > 1
    )
    assert sum(answer.finished.usage.cached_tokens for answer in together) > sum(len(p) for p in prompts) // 2
    moved = {t.transport for a in alone for t in a.finished.timings if t.transport}
    assert moved == {served.transport}
