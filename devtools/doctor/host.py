"""Checks of this machine: etcd, ports, shared memory, free memory.

Checks of the GPUs: what PyTorch can do with them, as it says itself, and what the embedded engine misses.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from devtools.doctor.finding import Finding, broken, warning, well
from runtime.machine import available_bytes
from runtime.network import is_free

MEGABYTE = 2**20
# Enough for two embedded workers with the demonstration model.
COMFORTABLE_MEGABYTES = 2048
PROGRAM_SECONDS = 10

# Holds an anonymous file open until its standard input ends, and prints its descriptor.
_HOLD_MEMORY = """
import os, sys
file = os.memfd_create("baton-doctor")
os.write(file, b"baton")
print(file, flush=True)
sys.stdin.read()
"""


def check_etcd(find_binary: Callable[[], str]) -> Iterator[Finding]:
    """Checks that etcd can run. `find_binary` returns its path, or raises ConfigError."""
    try:
        binary = find_binary()
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True
        )
    except ConfigError as error:
        yield warning(f"{error.message}; `baton up` needs it", "make install")
    except (OSError, subprocess.SubprocessError) as error:
        yield broken(f"etcd does not run: {error}", "make install, or put an etcd for this machine on the PATH")
    else:
        yield well(done.stdout.partition("\n")[0].replace(" Version:", "") + f" at {binary}")


def check_port(port: int, local_router: str | None) -> Iterator[Finding]:
    """Checks that the router's default port is free. `local_router` is the address of the router of `baton up`."""
    if is_free(port):
        yield well(f"port {port} is free")
    elif local_router == f"127.0.0.1:{port}":
        yield well(f"port {port} is used by the router of `baton up`")
    else:
        yield warning(
            f"port {port} is used by a process that `baton up` did not start from this folder",
            "nothing: `baton up` will choose another port, and `baton generate` will find it",
        )


def check_shared_memory() -> Iterator[Finding]:
    """Checks that one process can open another's anonymous file through /proc, as the shm transport does."""
    slow = "nothing, if intended: KV moves over tcp instead. In a container, do not hide /proc"
    try:
        seen = _read_from_another_process()
    except (OSError, ValueError, subprocess.SubprocessError, AttributeError) as error:
        yield warning(f"processes cannot map each other's memory here ({error}): the shm transport does not work", slow)
        return
    if seen == b"baton":
        yield well("processes can map each other's memory through /proc, which the shm transport needs")
    else:
        yield warning(
            f"reading another process's memory through /proc gave {seen!r}: the shm transport does not work", slow
        )


def check_memory() -> Iterator[Finding]:
    """Checks that there is enough free memory for two small workers."""
    available = available_bytes() // MEGABYTE
    if available < COMFORTABLE_MEGABYTES:
        yield warning(
            f"only {available} MiB of memory are free", "stop other processes, or run `make up ENGINE=simulated`"
        )
    else:
        yield well(f"{available} MiB of memory are free")


def _read_from_another_process() -> bytes:
    pipe = subprocess.PIPE
    command = [sys.executable, "-I", "-S", "-c", _HOLD_MEMORY]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as holder:
        assert holder.stdout is not None
        descriptor = int(holder.stdout.readline())
        file = os.open(f"/proc/{holder.pid}/fd/{descriptor}", os.O_RDONLY)
        try:
            return os.pread(file, 5, 0)
        finally:
            os.close(file)


GIB = 2**30
DRIVER_SECONDS = 60
# Ampere is the first with bfloat16 in its matrix units.
_BFLOAT16_CAPABILITY = (8, 0)
_COMFORTABLE_GIB = 8

# In a process of its own: importing PyTorch takes seconds, and a context takes memory of the GPU.
_REPORT = """
import importlib.util, json, torch
gpus = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append({"name": of.name, "capability": [of.major, of.minor], "free": free, "total": total})
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "gpus": gpus}
print(json.dumps({**found, "triton": importlib.util.find_spec("triton") is not None}))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as PyTorch sees it; memory in bytes."""

    name: str
    capability: tuple[int, int]
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class TorchReport:
    """PyTorch's report about itself. `cuda` is the version that it was built for, empty if for none."""

    torch: str
    cuda: str
    triton: bool
    gpus: tuple[Gpu, ...]


def check_gpus(visible: Sequence[str]) -> Iterator[Finding]:
    """Checks that the embedded engine can use the GPUs that NVIDIA's driver shows to this process."""
    if not visible:
        yield well("no NVIDIA GPU is visible: the embedded engine computes on the processor")
        return
    try:
        report = ask_torch()
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        yield broken(f"PyTorch cannot query the GPU: {error}", "make install")
        return
    yield from judge(report, len(visible))


def ask_torch() -> TorchReport:
    """Returns what PyTorch says. Raises SubprocessError if it cannot be loaded."""
    command = [sys.executable, "-c", _REPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True)
    return parse(done.stdout)


def parse(text: str) -> TorchReport:
    """Reads a report, the last line of `text`. Raises ValueError or KeyError."""
    found = json.loads(text.splitlines()[-1])
    gpus = (Gpu(one["name"], tuple(one["capability"]), one["free"], one["total"]) for one in found["gpus"])
    return TorchReport(found["torch"], found["cuda"], found["triton"], tuple(gpus))


def judge(report: TorchReport, visible: int) -> Iterator[Finding]:
    """The findings that follow from a report where the driver shows `visible` GPUs."""
    if not report.cuda:
        text = f"PyTorch {report.torch} is built without CUDA: the embedded engine does not use the {visible} GPUs"
        yield warning(text, "install PyTorch's build for CUDA, or set engine.device: cpu")
        return
    if not report.gpus:
        text = f"PyTorch {report.torch} finds none of the {visible} GPUs; it is built for CUDA {report.cuda}"
        yield broken(text, "install a driver for that version of CUDA, and see that CUDA_VISIBLE_DEVICES names GPUs")
        return
    if not report.triton:
        text = "Triton is not installed: no fused steps, no CUDA graphs, and no cuda_ipc between GPUs"
        yield warning(text, "pip install the version of triton that this PyTorch names")
    for gpu in report.gpus:
        yield from _judge_gpu(gpu)


def _judge_gpu(gpu: Gpu) -> Iterator[Finding]:
    free = f"{gpu.name}: {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB are free"
    if gpu.free < _COMFORTABLE_GIB * GIB:
        remedy = "stop the other processes on it, or set engine.gpu_memory_share for each of its workers"
        yield warning(free, remedy)
    else:
        yield well(free)
    if gpu.capability < _BFLOAT16_CAPABILITY:
        version = ".".join(map(str, gpu.capability))
        text = f"{gpu.name} has compute capability {version}, without fast bfloat16"
        yield warning(text, "set engine.dtype: float32, which takes twice the memory")
