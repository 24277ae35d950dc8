"""A request inside the stand-in, which is also what its caller reads: one object, whose outputs grow."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from fake_tensorrt_llm.values import CompletionOutput, Logprob


class RequestOutput:
    """An async iterable of itself, once for each step or several that were not read in time."""

    def __init__(self, context: tuple[int, ...], params: Any, handoff: Any, blocks: int) -> None:
        self.prompt_token_ids = list(context)
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.meaning: tuple[int, ...] = ()
        self.read: Any = None
        self.salt: str | None = None
        self.reused_blocks = 0
        self.cached_tokens = 0
        self.rank = 0
        self.metrics_dict: dict[str, Any] = {}
        self.params = params
        self.handoff = handoff
        self.blocks = blocks
        self.aborted = False
        self.aborts = 0
        self.engine: Callable[[], Any] = lambda: None
        self.trace_headers: dict[str, str] = {}
        self.fetched = False
        self.skips_a_step = False
        self.submitted = 0.0
        self.computed_at = 0.0
        self.fetching_since = 0.0
        self._queue: asyncio.Queue[BaseException | None] = asyncio.Queue()

    @property
    def kind(self) -> str:
        """context_only, generation_only, or an ordinary one."""
        return (self.handoff.request_type if self.handoff else None) or "context_and_generation"

    def abort(self) -> None:
        """Asks for its end. Of a prompt whose KV is committed it changes nothing."""
        self.aborts += 1
        engine = self.engine()
        if engine is None or engine.down:
            raise AttributeError("'NoneType' object has no attribute 'abort_request'")
        if engine.abort_fails is not None:
            raise engine.abort_fails
        self.aborted = True

    def cancel(self) -> None:
        """Its last output, after an abort."""
        self.outputs[0].finish_reason = "cancelled"
        self.finished = True
        self.put()

    def report(self) -> None:
        """The arguments that it took."""
        output = self.outputs[0]
        # Blocks are counted once for each attention window.
        cache = SimpleNamespace(num_reused_blocks=2 * self.reused_blocks)
        output.request_perf_metrics = SimpleNamespace(kv_cache_metrics=cache)
        self.metrics_dict = {"finished_reason": output.finish_reason}

    def put(self, error: BaseException | None = None) -> None:
        """There is something new."""
        self._queue.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        while True:
            error = await self._queue.get()
            if error is not None:
                raise error
            yield self
            if self.finished and self._queue.empty():
                return

    def step(self, vocab_size: int, row: int) -> None:
        """One id more. `row` is the request's place among those of the batch that are sampled."""
        output = self.outputs[0]
        token = next_id((*self.meaning, *output.token_ids), self.params, vocab_size, row)
        output.token_ids.append(token)
        if self.params.logprobs:
            output.logprobs.append(_logprobs(token, self.params.logprobs, vocab_size))
        self._finish(output, token)

    def _finish(self, output: CompletionOutput, token: int) -> None:
        """The first end of sequence, then the length, then stop words: in upstream's order."""
        may_stop = len(output.token_ids) > (self.params.min_tokens or 0)
        if may_stop and token == self.params.end_id and not self.params.ignore_eos:
            output.finish_reason = "stop"
        elif self.kind == "context_only" or len(output.token_ids) >= self.params.max_tokens:
            output.finish_reason = "length"
        elif may_stop and token in (self.params.stop_token_ids or ()):
            output.finish_reason, output.stop_reason = "stop", token
            if not self.params.include_stop_str_in_output:
                output.token_ids.pop()
        self.finished = output.finish_reason is not None


def next_id(context: tuple[int, ...], params: Any, vocab_size: int, row: int) -> int:
    """Follows from the context, and where it is sampled from the seed; in upstream's sampler only in the first row."""
    if params.temperature == 0:
        noise: object = None
    else:
        noise = params.seed if row == 0 else random.random()
    return int.from_bytes(hashlib.sha256(repr((context, noise)).encode()).digest()[:4], "big") % vocab_size


def _logprobs(token: int, count: int, vocab_size: int) -> dict[int, Logprob]:
    """The likeliest tokens and the sampled one, which is the second of them."""
    rivals = [(token + 1) % vocab_size, token, *((token + step) % vocab_size for step in range(2, count))]
    return {rival: Logprob(-0.1 - rank, rank + 1) for rank, rival in enumerate(rivals)}
