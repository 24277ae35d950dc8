"""The candidates: which processes are started for each, and which of them are the router."""

import asyncio
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import python_of
from runtime.aio import timeout

_PATIENCE_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A router of another project that serves at `port`."""

    name: str
    port: int
    pid: int


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[int]:
    """A process, until the context is left; its id."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@asynccontextmanager
async def engines(ports: Sequence[int], log: Path) -> AsyncIterator[None]:
    """The prefill and the decode worker of routers that relay bytes."""
    command = [sys.executable, "-m", "benchmarks.peers.engine"]
    with _running([*command, "prefill", str(ports[0])], log), _running([*command, "decode", str(ports[1])], log):
        for port in ports:
            await _answers(f"http://127.0.0.1:{port}/v1/models")
        yield


def vllm_router(folder: Path, port: int, metrics: int, engines: Sequence[int]) -> list[str]:
    """The command line of vllm-router, with prefill and decode apart."""
    return [
        *(str(python_of(folder)), "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--vllm-pd-disaggregation", "--prefill", f"http://127.0.0.1:{engines[0]}"),
        *("--decode", f"http://127.0.0.1:{engines[1]}", "--prometheus-port", str(metrics)),
    ]


def sglang_router(folder: Path, port: int, metrics: int, engines: Sequence[int]) -> list[str]:
    """The command line of sglang-router, with prefill and decode apart."""
    return [
        *(str(python_of(folder)), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--pd-disaggregation", "--prefill", f"http://127.0.0.1:{engines[0]}", "9001"),
        *("--decode", f"http://127.0.0.1:{engines[1]}", "--prometheus-port", str(metrics)),
    ]


@asynccontextmanager
async def peer(name: str, command: Sequence[str], port: int, log: Path) -> AsyncIterator[Peer]:
    """A router that has answered a request."""
    with _running(command, log) as pid:
        await _answers(f"http://127.0.0.1:{port}/v1/models")
        yield Peer(name, port, pid)


async def _answers(url: str) -> None:
    """Waits until there is any answer. Raises TimeoutError."""
    async with timeout(_PATIENCE_SECONDS):
        while not await asyncio.to_thread(_has_answer, url):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def _has_answer(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
