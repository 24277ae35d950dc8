"""A split model whose KV is kept: whichever ranks are killed, all start again together, on what fits, or empty."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.clients.generation import Answer, generate, greedy_text
from support.clients.scraping import scrape
from support.cluster.processes import Process, forked, keeper, ranks_of
from support.cluster.several_processes import until
from support.engines.device import DEVICE
from support.keeping import workers_of
from support.sampled import sampled
from support.servers.etcd import free_port

from baton.inference.v1 import generate_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(DEVICE != "cpu", reason="on GPUs ranks share no pool, and keep none"),
]

_PROMPTS = [f"Tell me {number} long stories: " + "once upon a time " * number for number in range(1, 4)]
_TOKENS = 200
_BLOCKS_AMID = 12  # of an answer; its prompt takes eight at most
_CONFIG = """
roles: [prefill, decode]
registry: {{kind: file, folder: {folder}}}
namespace: test
worker_id: kept
drain_seconds: 0
keep_memory: {{kv: true, hang_seconds: 30}}
metrics_listen: {metrics}
engine:
  {{kind: pytorch, model: models/demo, device: cpu, threads: 1, kv_cache_bytes: {pool}, tensor_parallel_size: 2}}
"""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A router, and one worker of two ranks that has a keeper."""

    router: Process
    keeper: Process
    metrics: str
    config: Path
    folder: Path

    def configure(self, pool: str) -> None:
        """Writes the configuration, which each start of the worker reads."""
        self.config.write_text(_CONFIG.format(folder=self.folder, metrics=self.metrics, pool=pool))

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes of both ranks; the keeper has those, too, that the last worker has left, until they end."""
        worker = workers_of(self.keeper.popen.pid)[-1]
        return [worker, *ranks_of(worker.pid)]

    def decodes(self, outcome: str) -> float:
        """The decodes that the worker's process has taken over; -1 while there is none that was started again."""
        try:
            found = scrape(self.metrics)
        except OSError:
            return -1
        started = found.sum("baton_worker_restarts_total")
        return found.sum("baton_recovered_decodes_total", outcome=outcome) if started else -1


class _Deployments:
    """Gives a deployment to two tests, each of which kills its worker.

    After the third failure in a row the keeper would free what it keeps.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack, self._given = folder, stack, 0

    def next(self) -> Deployment:
        if self._given % 2 == 0:
            self._stack.close()
            folder = self._folder / str(self._given)
            folder.mkdir()
            self._running = self._stack.enter_context(_deployed(folder))
        self._given += 1
        return self._running


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Deployments]:
    with ExitStack() as stack:
        yield _Deployments(tmp_path_factory.mktemp("deployments"), stack)


@pytest.fixture
def deployment(deployments: _Deployments) -> Deployment:
    return deployments.next()


@contextmanager
def _deployed(tmp_path: Path) -> Iterator[Deployment]:
    config, folder, metrics = tmp_path / "worker.yaml", tmp_path / "registry", f"127.0.0.1:{free_port()}"
    patience = [f"registry={{kind: file, folder: {folder}}}", "namespace=test", "retry.wait_seconds=120"]
    patience += ["openai.listen=''", "announce_seconds=0", "retry.reattach_seconds=60"]
    with ExitStack() as stack:
        router = stack.enter_context(forked("router", "router.yaml", patience, tmp_path / "router.log"))
        config.write_text(_CONFIG.format(folder=folder, metrics=metrics, pool="16MiB"))
        started = stack.enter_context(keeper(str(config), [], tmp_path / "worker.log"))
        started.wait_until_serving()
        router.wait_until_serving()
        yield Deployment(router, started, metrics, config, folder)
        assert started.terminate(60) == 0


@asynccontextmanager
async def _calls(deployment: Deployment) -> AsyncIterator[InferenceServiceStub]:
    async with open_channel(deployment.router.address) as channel:
        yield InferenceServiceStub(channel)


def _requests(keep_seconds: int) -> Sequence[generate_pb2.GenerateRequest]:
    requests = [greedy_text(prompt, _TOKENS) for prompt in _PROMPTS]
    for seed, request in enumerate(requests):
        request.stopping.ignore_eos = True
        request.response.keep.FromSeconds(keep_seconds)
        if seed % 2:
            request.sampling.temperature, request.sampling.seed = 0.9, seed
    return requests


async def _answers(stub: InferenceServiceStub, keep_seconds: int = 60) -> Sequence[Answer]:
    return await asyncio.gather(*(generate(stub, request) for request in _requests(keep_seconds)))


def _has_ended(each: psutil.Process) -> bool:
    """True also if nobody has asked yet for its exit code."""
    try:
        return not each.is_running() or each.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_amid(deployment: Deployment) -> bool:
    """True once all decode, with more blocks than their prompts take: one that is killed before has only its ids."""
    running = scrape(deployment.metrics).sum("baton_worker_running_requests")
    return running == len(_PROMPTS) and _used_blocks(deployment) >= _BLOCKS_AMID * len(_PROMPTS)


def _used_blocks(deployment: Deployment) -> float:
    return scrape(deployment.metrics).sum("baton_kv_blocks", state="used")


_expected: list[tuple[int, ...]] = []


async def _undisturbed(deployment: Deployment, stub: InferenceServiceStub) -> list[tuple[int, ...]]:
    """The ids of undisturbed answers, the same of every deployment. What is counted afterwards is of others."""
    if not _expected:
        _expected.extend(answer.ids for answer in await _answers(stub, keep_seconds=0))
    await until(lambda: _used_blocks(deployment) == 0)
    return _expected


# Rank 0 alone is killed in the tests below, too; both are as one process that is killed.
_LOST = {"rank 0": (0,), "rank 1": (1,), "both": (0, 1)}


@pytest.mark.parametrize("lost", sampled(_LOST, ["rank 1"]))
async def test_streams_go_on_with_all_their_kv_whichever_rank_is_killed(deployment: Deployment, lost: str) -> None:
    async with _calls(deployment) as stub:
        expected = await _undisturbed(deployment, stub)
        running = asyncio.create_task(_answers(stub))
        await until(lambda: _is_amid(deployment))
        ranks = deployment.ranks
        for rank in _LOST[lost]:
            ranks[rank].kill()
        again = await running
        assert [answer.ids for answer in again] == expected
        assert deployment.decodes("whole") == len(_PROMPTS)
        assert deployment.decodes("damaged") == 0
        assert all(_has_ended(each) for each in ranks)
        assert len(deployment.ranks) == 2


async def test_a_rank_that_is_stopped_is_killed_before_its_memory_is_taken_over(deployment: Deployment) -> None:
    async with _calls(deployment) as stub:
        expected = await _undisturbed(deployment, stub)
        running = asyncio.create_task(_answers(stub))
        await until(lambda: _is_amid(deployment))
        leader, follower = deployment.ranks
        follower.send_signal(signal.SIGSTOP)
        leader.kill()
        again = await running
        assert [answer.ids for answer in again] == expected
        assert _has_ended(follower)
        assert deployment.decodes("damaged") == 0


async def test_kept_memory_of_another_size_is_freed_and_all_ranks_start_empty(deployment: Deployment) -> None:
    async with _calls(deployment) as stub:
        expected = await _undisturbed(deployment, stub)
        deployment.configure("24MiB")
        running = asyncio.create_task(_answers(stub))
        await until(lambda: _is_amid(deployment))
        deployment.ranks[0].kill()
        again = await running
        assert [answer.ids for answer in again] == expected
        assert deployment.decodes("whole") == 0
        assert "kept KV does not fit" in deployment.keeper.log.read_text()
