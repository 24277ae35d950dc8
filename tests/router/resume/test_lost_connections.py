"""An answer whose worker is well, and whose connection to the router was lost: it goes on where it runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.clients.resuming import Received
from support.cluster.in_process import PATIENT, Bench, bench, simulated
from support.cluster.processes import Process, keeper
from support.cluster.router_pair import kept_request, read
from support.eventually import PATIENCE_SECONDS, eventually
from support.keeping import workers_of
from support.servers.tcp_proxy import TcpProxy

from baton.errors import BatonError
from baton.inference.v1 import generate_pb2
from baton.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from discovery.file import FileRegistry
from discovery.memory import MemoryRegistry
from discovery.record import TAKES_OVER
from router.config import RetryConfig
from router.server import host_router
from router.telemetry import metrics
from rpc.channels import open_channel

_WAITING = PATIENT.model_copy(update={"retry": RetryConfig(wait_seconds=PATIENCE_SECONDS)})
_IMPATIENT = PATIENT.model_copy(update={"retry": RetryConfig(wait_seconds=1)})


def _attached() -> float:
    value: float = metrics.REATTACHMENTS.labels("attached")._value.get()
    return value


async def _lose_connection(running: Bench, received: Received, tokens: int) -> None:
    await eventually(lambda: received.tokens >= tokens)
    await running.proxies["decode"].cut()
    await running.proxies["decode"].restore()


@pytest.mark.parametrize("fields", [{}, {"response": {"logprobs": 2}}, {"stopping": {"stop": ["ab", "zz"]}}])
async def test_a_kept_answer_goes_on_at_its_only_worker_after_its_connection_is_lost(fields: dict[str, object]) -> None:
    fields = {"stopping": {"max_tokens": 400, **dict(fields.pop("stopping", {}))}, **fields}  # type: ignore[call-overload]
    request = kept_request(**fields)
    configs = simulated("prefill", "prefill"), simulated("decode", "decode", decode_step_seconds=0.005)
    async with bench(*configs, router=_WAITING) as running:
        expected = await read(running.stub.Generate(request, timeout=PATIENCE_SECONDS), Received(request))
        before, received = _attached(), Received(request)
        losing = asyncio.create_task(_lose_connection(running, received, min(20, expected.tokens // 2)))
        await read(running.stub.Generate(request, timeout=PATIENCE_SECONDS), received)
        await losing
        assert received.whole == expected.whole
        assert received.finished is not None
        assert received.finished.migrations == 0
        assert _attached() == before + 1
        await eventually(lambda: running.used_blocks() == 0)


async def test_an_answer_whose_only_worker_has_forgotten_it_fails_as_without_the_attempt() -> None:
    request = kept_request(stopping={"max_tokens": 400}, routing={"topology": "TOPOLOGY_DISAGGREGATED"})
    configs = simulated("prefill", "prefill"), simulated("decode", "decode", decode_step_seconds=0.005)
    async with bench(*configs, router=_IMPATIENT) as running:
        received, before = Received(request), _attached()

        async def lose() -> None:
            await eventually(lambda: received.tokens >= 20)
            await running.proxies["decode"].cut()
            running.workers["decode"].kept.forget_all()
            await running.proxies["decode"].restore()

        losing = asyncio.create_task(lose())
        with pytest.raises(BatonError):
            await read(running.stub.Generate(request, timeout=PATIENCE_SECONDS), received)
        await losing
        assert _attached() == before
        await eventually(lambda: running.used_blocks() == 0)


async def test_a_disaggregated_answer_goes_on_at_its_worker_though_another_is_ready() -> None:
    request = kept_request(stopping={"max_tokens": 400}, routing={"topology": "TOPOLOGY_DISAGGREGATED"})
    decodes = [simulated(f"decode-{number}", "decode", decode_step_seconds=0.005) for number in range(2)]
    async with bench(simulated("prefill", "prefill"), *decodes, router=_WAITING) as running:
        expected = await read(running.stub.Generate(request, timeout=PATIENCE_SECONDS), Received(request))
        before, received = _attached(), Received(request)
        reading = asyncio.create_task(read(running.stub.Generate(request, timeout=PATIENCE_SECONDS), received))
        await eventually(lambda: received.tokens >= 20)
        [lost] = [name for name, worker in running.workers.items() if worker.kept.usage.attached]
        await running.proxies[lost].cut()
        await running.proxies[lost].restore()
        await reading
        assert received.whole == expected.whole
        assert received.finished is not None
        assert (received.finished.migrations, received.finished.decode_worker_id) == (0, lost)
        assert _attached() == before + 1
        await eventually(lambda: running.used_blocks() == 0)


@asynccontextmanager
async def _worker_with_kept_memory(folder: Path) -> AsyncIterator[Process]:
    """A worker whose next process would go on with its answers; its registry is in the folder."""
    engine = "engine={kind: pytorch, model: models/demo, execution: fused, threads: 1, kv_cache_bytes: 16MiB}"
    registry = f"registry={{kind: file, folder: {folder / 'registry'}}}"
    keeping = ["keep_memory={weights: true, kv: true}", "drain_seconds=0", "namespace=test"]
    keeping += ["worker_id=kept"]
    with keeper("worker.yaml", [engine, registry, *keeping], folder / "worker.log") as worker:
        await asyncio.to_thread(worker.wait_until_serving)
        yield worker


async def _amid(
    stub: InferenceServiceStub, request: generate_pb2.GenerateRequest
) -> tuple[Received, Received, asyncio.Task[Received]]:
    """The whole answer, and the same request again, that is being read and has some tokens."""
    expected = await read(stub.Generate(request, timeout=PATIENCE_SECONDS), Received(request))
    received = Received(request)
    reading = asyncio.create_task(read(stub.Generate(request, timeout=PATIENCE_SECONDS), received))
    await eventually(lambda: received.tokens >= 20)
    return expected, received, reading


@pytest.mark.timeout(120)
async def test_a_kept_answer_of_a_worker_with_kept_memory_goes_on_there_in_the_same_process(
    tmp_path: Path,
) -> None:
    request = kept_request(stopping={"max_tokens": 600})
    request.response.keep.seconds = 30
    registry = MemoryRegistry("test")
    async with (
        _worker_with_kept_memory(tmp_path) as worker,
        FileRegistry(tmp_path / "registry", "test", 10.0) as own,
        TcpProxy(worker.address) as proxy,
        host_router(_WAITING, registry) as router,
        open_channel(router.address) as channel,
    ):
        async with aclosing(own.watch()) as views:
            [record] = await anext(view async for view in views if view)
        assert TAKES_OVER in record.capabilities
        async with registry.register(replace(record, address=proxy.address)):
            await eventually(lambda: [one.problem for one in router.cluster.workers] == [""])
            expected, received, reading = await _amid(InferenceServiceStub(channel), request)
            before = _attached()
            await proxy.cut()
            await proxy.restore()
            await reading
            assert received.whole == expected.whole
            assert received.finished is not None
            assert received.finished.migrations == 0
            assert _attached() == before + 1
            assert "worker was started again" not in worker.log.read_text()


@pytest.mark.timeout(120)
async def test_a_kept_answer_is_attached_to_once_if_the_next_process_serves_before_it_is_registered(
    tmp_path: Path,
) -> None:
    """It listens at the lost one's address, but a channel to the lost one is closed once the next one is registered."""
    request = kept_request(stopping={"max_tokens": 600, "ignore_eos": True})
    request.response.keep.seconds = 60
    registry = MemoryRegistry("test")
    async with (
        _worker_with_kept_memory(tmp_path) as worker,
        FileRegistry(tmp_path / "registry", "test", 10.0) as own,
        host_router(_WAITING, registry) as router,
        open_channel(router.address) as channel,
        aclosing(own.watch()) as views,
    ):
        [record] = await anext(view async for view in views if view)
        async with registry.register(record):
            await eventually(lambda: [one.problem for one in router.cluster.workers] == [""])
            expected, received, reading = await _amid(InferenceServiceStub(channel), request)
            before = _attached()
            [lost] = router.cluster.workers
            workers_of(worker.popen.pid)[0].kill()
            [after] = await anext(view async for view in views if view and view[0].epoch > record.epoch)
            await eventually(lambda: not lost.problem and lost.health.silent_seconds < 1)
            await asyncio.sleep(1.5)  # more than the router waits for a registration
            async with registry.register(after):
                await reading
                assert received.whole == expected.whole
                assert _attached() == before + 1
