"""What runs inside TensorRT-LLM now: submitted here, followed to its end, and counted."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from rpc.errors import BatonError, EngineFailed, InvalidRequest, Overloaded
from services.engines.trtllm.generation import Generation
from services.engines.trtllm.package import Package

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """What the engine is asked: `inputs` as it takes them, which are `tokens` long, and more by name.

    The first `replayed` ids of the answer are known. `keeps` is kept until the answer has begun. An answer that nobody
    has read for `reader_seconds` is aborted.
    """

    inputs: Any
    tokens: int
    replayed: int
    logprobs: int | None
    arguments: Mapping[str, Any]
    keeps: object = None
    reader_seconds: float = math.inf


class Running:
    """Every request that the engine has. A fatal error fails all of them, and whatever comes later."""

    def __init__(
        self, llm: Any, package: Package, limit: int, block_tokens: int, on_end: Callable[[Any], None]
    ) -> None:
        self.failure: EngineFailed | None = None
        self._llm = llm
        self._package = package
        self._limit = limit
        self._block_tokens = block_tokens
        self._on_end = on_end
        self._tasks: dict[Generation, asyncio.Task[None]] = {}
        self._progressed_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def blocks(self) -> int:
        """By what they have read and written; the engine's own number may be a little higher."""
        return sum(-(-each.num_tokens // self._block_tokens) for each in self._tasks)

    @property
    def stalled_seconds(self) -> float:
        """How long work has been in flight without any progress."""
        return time.monotonic() - self._progressed_at if self._tasks else 0.0

    @property
    def idle_seconds(self) -> float:
        """How long there has been no work at all."""
        return 0.0 if self._tasks else time.monotonic() - self._progressed_at

    def submit(self, order: Order) -> Generation:
        """Gives a request to the engine. Raises Overloaded, InvalidRequest, or EngineFailed."""
        if self.failure is not None:
            raise self.failure
        if len(self._tasks) >= self._limit:
            raise Overloaded(f"{len(self._tasks)} requests run and wait here", retry_after_seconds=1.0)
        if not self._tasks:
            self._progressed_at = time.monotonic()
        generation = Generation(self._ask(order), order.tokens, order.replayed, order.logprobs)
        generation.keeps = order.keeps
        generation.reader_seconds = order.reader_seconds
        task = asyncio.create_task(generation.follow(self.progressed))
        self._tasks[generation] = task
        task.add_done_callback(partial(self._ended, generation))
        return generation

    async def close(self) -> None:
        """Stops following whatever runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ask(self, order: Order) -> Any:
        known = {name: value for name, value in order.arguments.items() if value is not None}
        if unknown := sorted(set(known) - self._package.generate_arguments):
            raise EngineFailed(f"TensorRT-LLM {self._package.version} does not take {', '.join(unknown)}")
        try:
            return self._llm.generate_async(order.inputs, **known)
        except TypeError as error:
            # Not the client's doing: the version's signature is not what it said.
            raise EngineFailed(f"TensorRT-LLM {self._package.version} refused a call: {error}") from error
        except ValueError as error:
            raise InvalidRequest.of("prompt", str(error)) from error
        except RuntimeError as error:
            self._fail(error)
            raise EngineFailed(f"TensorRT-LLM has ended: {error}") from error

    def progressed(self) -> None:
        """The engine has gone on, in whatever it does."""
        self._progressed_at = time.monotonic()

    def _ended(self, generation: Generation, task: "asyncio.Task[None]") -> None:
        del self._tasks[generation]
        self.progressed()
        generation.end(self._why(task))
        if generation.error is None:
            self._on_end(generation.result)

    def _why(self, task: "asyncio.Task[None]") -> BatonError | None:
        if task.cancelled():
            return EngineFailed("the engine is closed")
        error = task.exception()
        if error is None:
            return None
        if not isinstance(error, self._package.request_error):
            self._fail(error)
        return EngineFailed(f"TensorRT-LLM failed: {type(error).__name__}: {error}")

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            log.error("trtllm engine failed", error=f"{type(error).__name__}: {error}")
            self.failure = EngineFailed(f"TensorRT-LLM failed: {type(error).__name__}: {error}")
