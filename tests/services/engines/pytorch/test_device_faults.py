"""A GPU's failed assertion and its lack of memory, as a worker's callers and its supervisor see them.

With BATON_TEST_DEVICE=cuda both are the GPU's own errors. The worker is a process, which the assertion ends.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.worker_calls import calls_to, decode_request
from support.cluster.processes import Process, process
from support.engines.checkpoints import DEMO
from support.engines.device import DEVICE
from support.engines.device_faults import ASSERTS, HANGS, LARGE
from support.engines.embedded import Checkpoint
from support.engines.engine_calls import collect, greedy
from support.eventually import PATIENCE_SECONDS, eventually

from baton.errors import ConfigError, DeviceFailed, EngineFailed, OutOfMemory
from services.engines.prompt import Prompt
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.failures import failure_of, is_out_of_memory
from services.engines.pytorch.model.loading import choose_device

EXECUTIONS = ["library", "fused"] if DEVICE == "cuda" else ["library"]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: make gpu")
needs_two_gpus = pytest.mark.skipif(
    DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="needs two GPUs: make gpu where there are two"
)


@contextmanager
def failing_worker(folder: Path, execution: str) -> Iterator[Process]:
    engine = (
        f"engine={{kind: pytorch, model: {DEMO}, device: {DEVICE}, dtype: float32, execution: {execution}, "
        f"kv_cache_bytes: 64MiB, threads: 1}}"
    )
    settings = ["registry.kind=memory", "drain_seconds=1", "log.format=json", engine]
    with process("tests.support.engines.device_faults", "decode.yaml", settings, folder / "worker.log") as started:
        started.wait_until_serving()
        yield started


@asynccontextmanager
async def health_states(address: str) -> AsyncIterator[list[int]]:
    """Every state that the worker reports from now on."""
    states: list[int] = []

    async def watch(stub: health_pb2_grpc.HealthStub) -> None:
        try:
            async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                states.append(answer.status)
        except grpc.aio.AioRpcError:  # the worker has ended
            return

    async with grpc.aio.insecure_channel(address) as channel:
        watching = asyncio.create_task(watch(health_pb2_grpc.HealthStub(channel)))
        try:
            yield states
        finally:
            watching.cancel()
            await asyncio.wait([watching], timeout=PATIENCE_SECONDS)


async def last_code(call: "grpc.aio.UnaryStreamCall[Any, Any]") -> grpc.StatusCode:
    """The status at the end of a stream. gRPC keeps it back until all messages have been read."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


@pytest.mark.parametrize("execution", EXECUTIONS)
async def test_a_failed_assertion_of_the_gpu_fails_every_request_and_ends_the_worker(
    tmp_path: Path, execution: str
) -> None:
    with failing_worker(tmp_path, execution) as worker:
        async with calls_to(worker.address) as calls, health_states(worker.address) as states:
            await eventually(lambda: states == [SERVING])
            beside = calls.decodes.Decode(
                decode_request(request_id="beside", max_tokens=4000), timeout=PATIENCE_SECONDS
            )
            await beside.read()
            with pytest.raises(DeviceFailed) as failed:
                await calls.decode(decode_request(text=bytes([5, ASSERTS, 7])))
            assert failed.value.reason == "DEVICE_FAILED"
            assert await last_code(beside) == grpc.StatusCode.INTERNAL
            await eventually(lambda: states == [SERVING, NOT_SERVING])
            # Not the signal of the abort that the interpreter's end would have met.
            assert await asyncio.to_thread(worker.popen.wait, PATIENCE_SECONDS) == 1


async def test_a_failed_device_that_hangs_at_the_end_of_the_process_gives_exit_code_1(tmp_path: Path) -> None:
    with failing_worker(tmp_path, "library") as worker:
        async with calls_to(worker.address) as calls:
            with pytest.raises(DeviceFailed):
                await calls.decode(decode_request(text=bytes([5, HANGS, 7])))
            assert await asyncio.to_thread(worker.popen.wait, PATIENCE_SECONDS) == 1


@pytest.mark.parametrize("execution", EXECUTIONS)
async def test_a_request_that_the_gpu_has_no_memory_for_fails_alone(tmp_path: Path, execution: str) -> None:
    with failing_worker(tmp_path, execution) as worker:
        async with calls_to(worker.address) as calls, health_states(worker.address) as states:
            alone = await calls.decode(decode_request(max_tokens=200))
            beside = asyncio.create_task(calls.decode(decode_request(request_id="beside", max_tokens=200)))
            for number in range(3):
                with pytest.raises(OutOfMemory) as failed:
                    await calls.decode(decode_request(request_id=f"large-{number}", text=bytes([9]) * LARGE))
                assert failed.value.reason == "OUT_OF_MEMORY"
            assert (await beside).token_ids == alone.token_ids
            assert (await calls.decode(decode_request(max_tokens=200))).token_ids == alone.token_ids
            assert states == [SERVING]
        assert worker.popen.poll() is None


@needs_gpu
def test_the_gpus_own_lack_of_memory_is_told_from_its_failures() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(failed.value)
    assert type(failure_of("engine", failed.value)) is OutOfMemory


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: out of memory"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), DeviceFailed),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceFailed),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), DeviceFailed),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), DeviceFailed),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp"), DeviceFailed),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), EngineFailed),
    ],
)
def test_each_failure_of_the_computation_has_the_class_of_its_cause(
    error: RuntimeError, kind: type[EngineFailed]
) -> None:
    assert type(failure_of("engine", error)) is kind


@needs_gpu
def test_a_gpu_that_is_not_there_is_refused_by_its_index() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device: cuda:99: this process sees"):
        choose_device(PyTorchConfig(model=DEMO, device="cuda:99"))
    assert choose_device(PyTorchConfig(model=DEMO, device="cuda:0")) == torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here are GPUs")
def test_a_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device: cuda:1 was asked for"):
        choose_device(PyTorchConfig(model=DEMO, device="cuda:1"))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1,2", "CUDA"])
def test_a_device_that_is_misspelt_is_refused_with_the_names_that_are_valid(device: str) -> None:
    with pytest.raises(ValueError, match="expected auto, cpu, cuda or cuda:N"):
        PyTorchConfig(model=DEMO, device=device)


@needs_two_gpus
@pytest.mark.parametrize("execution", ["library", "fused"])
async def test_engines_on_two_gpus_of_one_process_compute_the_same_ids_at_the_same_time(
    llama: Checkpoint, execution: str
) -> None:
    prompt = Prompt(tuple(range(20, 70)))
    zero, one = (llama.engine(device=f"cuda:{index}", execution=execution) for index in range(2))
    async with zero, one:
        answers = await asyncio.gather(*(collect(each.decode(prompt, greedy(40))) for each in (zero, one) * 4))
        assert [str(next(each.module.parameters()).device) for each in (zero, one)] == ["cuda:0", "cuda:1"]
    assert {answer.ids for answer in answers} == {llama.generate(prompt.token_ids, 40)}
