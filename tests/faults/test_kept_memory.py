"""Workers that are killed under running streams, with a keeper: the streams go on, on KV that was kept."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.clients.generation import Answer, generate, greedy_text
from support.clients.scraping import scrape
from support.cluster.processes import Process, forked, process
from support.cluster.several_processes import until
from support.engines.checkpoints import DEMO
from support.keeping import workers_of
from support.sampled import sampled
from support.servers.etcd import free_port

from baton import AsyncClient
from baton.errors import DeadlineExceeded, Draining, LayoutMismatch, RequestExists
from baton.inference.v1 import cluster_service_pb2, generate_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from rpc.channels import open_channel

_PROMPTS = [f"Tell me {number} long stories: " + "once upon a time " * number for number in range(1, 7)]
_TOKENS = 300
_TOKENS_AMID_AN_UPGRADE = 600  # the next process loads meanwhile
_ENGINE = "engine={kind: pytorch, model: models/demo, execution: fused, threads: 1, kv_cache_bytes: 67108864}"
_BLOCKS_AMID = 12  # of an answer; its prompt takes eight at most
_DEATHS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP]


@dataclass(frozen=True, slots=True)
class Deployment:
    """A router, and one worker that has a keeper."""

    router: Process
    keeper: Process
    metrics: str
    router_metrics: str
    model: Path

    @property
    def worker(self) -> psutil.Process:
        """The worker's process, which is the keeper's child."""
        [child] = workers_of(self.keeper.popen.pid)
        return child

    def restarted(self, cause: str) -> bool:
        try:
            return scrape(self.metrics).sum("baton_worker_restarts_total", cause=cause) == 1
        except OSError:
            return False


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with _deployed(tmp_path) as started:
        yield started


@pytest.fixture(scope="module")
def shared_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """For tests that leave it with a worker that serves, and was started again where they count; only two of them kill.

    After the third failure in a row the keeper would free what it keeps.
    """
    with _deployed(tmp_path_factory.mktemp("shared")) as started:
        yield started


@contextmanager
def _deployed(tmp_path: Path) -> Iterator[Deployment]:
    # A copy, so that a test may change it.
    model = shutil.copytree(DEMO, tmp_path / "model")
    shared = [f"registry={{kind: file, folder: {tmp_path / 'registry'}}}", "namespace=test", "drain_seconds=5"]
    metrics = f"127.0.0.1:{free_port()}"
    kept = ["keep_memory={weights: true, kv: true, hang_seconds: 3}", f"metrics_listen={metrics}", _ENGINE]
    kept += [f"engine.model={model}"]
    router_metrics = f"127.0.0.1:{free_port()}"
    patience = ["retry.wait_seconds=120", "openai.listen=''", "announce_seconds=0", f"metrics_listen={router_metrics}"]
    with ExitStack() as stack:
        keeper = stack.enter_context(process("services", "worker.yaml", [*shared, *kept], tmp_path / "worker.log"))
        router = stack.enter_context(forked("router", "router.yaml", [*shared, *patience], tmp_path / "router.log"))
        keeper.wait_until_serving()
        router.wait_until_serving()
        yield Deployment(router, keeper, metrics, router_metrics, model)
        assert keeper.terminate(60) == 0


@asynccontextmanager
async def _calls(deployment: Deployment) -> AsyncIterator[InferenceServiceStub]:
    async with open_channel(deployment.router.address) as channel:
        yield InferenceServiceStub(channel)


def _requests(*, keep_seconds: int, tokens: int = _TOKENS) -> Sequence[generate_pb2.GenerateRequest]:
    requests = [greedy_text(prompt, tokens) for prompt in _PROMPTS]
    for seed, request in enumerate(requests):
        request.stopping.ignore_eos = True
        request.response.keep.FromSeconds(keep_seconds)
        if seed % 2:
            request.sampling.temperature, request.sampling.seed = 0.9, seed
            request.sampling.frequency_penalty = 0.1
    return requests


async def _answers(
    stub: InferenceServiceStub, requests: Sequence[generate_pb2.GenerateRequest] | None = None
) -> Sequence[Answer]:
    requests = _requests(keep_seconds=0) if requests is None else requests
    return await asyncio.gather(*(generate(stub, request) for request in requests))


_expected: list[Answer] = []


async def _undisturbed(stub: InferenceServiceStub) -> Sequence[Answer]:
    """Returns undisturbed answers, as long as any are. Every deployment gives the same, so they are asked for once."""
    if not _expected:
        _expected.extend(await _answers(stub, _requests(keep_seconds=0, tokens=_TOKENS_AMID_AN_UPGRADE)))
    return _expected


def _begins(found: Sequence[Answer], expected: Sequence[Answer], tokens: int = _TOKENS) -> bool:
    """True if each has so many tokens, with which the expected one begins, and their text."""
    return all(
        answer.ids == whole.ids[:tokens] and len(answer.ids) == tokens and whole.text.startswith(answer.text)
        for answer, whole in zip(found, expected, strict=True)
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("death", sampled(_DEATHS, [signal.SIGSTOP], lambda death: death.name))
async def test_streams_go_on_when_their_worker_dies(shared_deployment: Deployment, death: signal.Signals) -> None:
    deployment = shared_deployment
    async with _calls(deployment) as stub:
        expected = await _undisturbed(stub)
        running = asyncio.create_task(_answers(stub))
        first = deployment.worker
        await until(lambda: _is_amid(deployment))
        os.kill(first.pid, death)
        again = await running
        assert _begins(again, expected)
        assert not first.is_running()
        assert deployment.restarted("hang" if death == signal.SIGSTOP else death.name)
        found = scrape(deployment.metrics)
        assert found.sum("baton_kv_recovered_blocks_total", outcome="used") > 0
        assert found.sum("baton_kv_recovered_blocks_total", outcome="damaged") == 0
        assert found.sum("baton_prefix_cache_hit_tokens_total") > 0
        await until(lambda: _used_blocks(deployment) == 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("death", sampled(_DEATHS, [signal.SIGKILL], lambda death: death.name))
async def test_kept_streams_go_on_with_all_their_kv_in_the_next_process(
    shared_deployment: Deployment, death: signal.Signals
) -> None:
    deployment, requests = shared_deployment, _requests(keep_seconds=60)
    async with _calls(deployment) as stub:
        expected = await _undisturbed(stub)
        await until(lambda: _used_blocks(deployment) == 0)  # a report may still count those
        attached = _attached(deployment)
        running = asyncio.create_task(_answers(stub, requests))
        await until(lambda: _have_tokens(deployment))
        os.kill(deployment.worker.pid, death)
        again = await running
        assert _begins(again, expected)
        found = scrape(deployment.metrics)
        assert found.sum("baton_recovered_decodes_total", outcome="whole") == len(requests)
        assert found.sum("baton_recovered_decodes_total", outcome="damaged") == 0
        assert found.sum("baton_worker_prompt_tokens_total") == 0  # none was computed again
        assert _attached(deployment) == attached + len(requests)
        await until(lambda: _used_blocks(deployment) == 0)


@pytest.mark.timeout(300)
async def test_an_upgrade_in_place_ends_no_stream_and_computes_nothing_twice(shared_deployment: Deployment) -> None:
    deployment, requests = shared_deployment, _requests(keep_seconds=60, tokens=_TOKENS_AMID_AN_UPGRADE)
    async with _calls(deployment) as stub, AsyncClient(deployment.router.address) as client:
        expected = await _undisturbed(stub)
        await until(lambda: _used_blocks(deployment) == 0)
        running = asyncio.create_task(_answers(stub, requests))
        await until(lambda: _have_tokens(deployment))
        first = deployment.worker
        [worker] = await client.workers()
        await client.upgrade_worker(worker.worker_id)
        assert not first.is_running()
        again = await running
        assert _begins(again, expected, _TOKENS_AMID_AN_UPGRADE)
        found = scrape(deployment.metrics)
        assert found.sum("baton_recovered_decodes_total", outcome="whole") == len(requests)
        assert found.sum("baton_worker_prompt_tokens_total") == 0  # none was computed again
        assert deployment.restarted("upgrade")
        await until(lambda: _used_blocks(deployment) == 0)
        await client.upgrade_worker(worker.worker_id)  # the next one can be upgraded, too
        assert _begins(await _answers(stub), expected)


@pytest.mark.slow  # tests/services/keeper/test_upgrader.py has it of a worker and a keeper in one process
@pytest.mark.timeout(300)
async def test_an_upgrade_whose_caller_has_left_goes_on_alone(deployment: Deployment, tmp_path: Path) -> None:
    async with _calls(deployment) as stub, AsyncClient(deployment.router.address) as client:
        running = asyncio.create_task(_answers(stub, _requests(keep_seconds=60)))
        [worker] = await client.workers()
        with pytest.raises(DeadlineExceeded):
            await client.upgrade_worker(worker.worker_id, timeout_seconds=0.2)
        with pytest.raises(RequestExists, match="an upgrade of this worker is running"):
            await client.upgrade_worker(worker.worker_id)
        await until(lambda: deployment.restarted("upgrade"))
        assert [len(answer.ids) for answer in await running] == [_TOKENS] * len(_PROMPTS)
        assert "killing it" not in (tmp_path / "worker.log").read_text()


@pytest.mark.timeout(300)
async def test_code_for_another_model_does_not_take_over(shared_deployment: Deployment) -> None:
    deployment, requests = shared_deployment, _requests(keep_seconds=60)
    async with _calls(deployment) as stub, AsyncClient(deployment.router.address) as client:
        expected = await _undisturbed(stub)
        running = asyncio.create_task(_answers(stub, requests))
        first = deployment.worker
        (deployment.model / "model.safetensors").touch()
        [worker] = await client.workers()
        with pytest.raises(LayoutMismatch, match="the new process does not fit: it needs KV of another form"):
            await client.upgrade_worker(worker.worker_id)
        assert first == deployment.worker
        again = await running
        assert _begins(again, expected)


@pytest.mark.timeout(300)
async def test_a_worker_that_drains_is_not_upgraded(shared_deployment: Deployment) -> None:
    """The last test of the deployment, which ends with it."""
    deployment = shared_deployment
    async with _calls(deployment) as stub, AsyncClient(deployment.router.address) as client:
        running = asyncio.create_task(_answers(stub, _requests(keep_seconds=0)))
        await until(lambda: _is_amid(deployment))
        [worker] = await client.workers()
        draining = asyncio.create_task(client.drain_worker(worker.worker_id))
        while (await client.workers())[0].state != cluster_service_pb2.WORKER_STATE_DRAINING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        with pytest.raises(Draining, match="cannot be upgraded"):
            await client.upgrade_worker(worker.worker_id)
        running.cancel()
        await draining


def _is_amid(deployment: Deployment) -> bool:
    return scrape(deployment.metrics).sum("baton_worker_running_requests") == len(_PROMPTS)


def _have_tokens(deployment: Deployment) -> bool:
    """True if all run, and have more blocks than their prompts take: one that is killed before has only its ids."""
    return _is_amid(deployment) and _used_blocks(deployment) >= _BLOCKS_AMID * len(_PROMPTS)


def _attached(deployment: Deployment) -> float:
    return scrape(deployment.router_metrics).sum("baton_router_reattachments_total", result="attached")


def _used_blocks(deployment: Deployment) -> float:
    return scrape(deployment.metrics).sum("baton_kv_blocks", state="used")
