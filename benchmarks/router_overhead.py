"""The load of benchmarks of the router: simulated workers of two speeds, and prompts.

Prompts are texts of 512 tokens that differ, so they are tokenized, prefilled on one worker and decoded on another.
Programs that run beside another checkout import its file of this name.
"""

from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import count
from multiprocessing.connection import Connection

from benchmarks.processes import run_process, until_told
from discovery.memory import MemoryRegistry
from router.config import RouterConfig, RoutingConfig
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

PROMPT_TOKENS = 512
TOKENS = 128
TOKENS_PER_SECOND = 30
CONNECTIONS = 8  # of the client
PACED, FLAT = "paced", "flat"
# Every prompt is prefilled on one worker and decoded on another, whatever that would gain.
SEPARATE = RoutingConfig(policy="least_loaded")
ROUTER = RouterConfig(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", drain_seconds=0, routing=SEPARATE)


def run_workers(pipe: Connection) -> None:
    """Serves each role of each model until the pipe ends."""

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        async with AsyncExitStack() as stack:
            for model, step_seconds in ((PACED, 1 / TOKENS_PER_SECOND), (FLAT, 0.0)):
                for role in ("prefill", "decode"):
                    config = worker_config(model, role, step_seconds if role == "decode" else 0.0)
                    await stack.enter_async_context(host_worker(config, registry))
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(serve)


def worker_config(model: str, role: str, step_seconds: float) -> WorkerConfig:
    return WorkerConfig(
        worker_id=f"{model}-{role}",
        roles=(role,),  # type: ignore[arg-type]
        engine=SimulatedConfig(
            name=model,
            num_blocks=65536,
            block_bytes=64,
            decode_step_seconds=step_seconds,
            max_context_tokens=1024,
            max_batch=1024,
        ),
        transports=("shm",),
        drain_seconds=0,
    )


def prompts(first: int = 0) -> Iterator[str]:
    """Texts of 512 bytes, which are tokens here, without common prefixes, numbered from `first` on."""
    for number in count(first):
        yield f"{number:08d} {'the quick brown fox jumps over the lazy dog ' * 12}"[:PROMPT_TOKENS]
