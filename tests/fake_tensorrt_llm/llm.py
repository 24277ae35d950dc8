"""The stand-in's LLM: a queue, a batch, blocks, and KV that waits to be fetched by another LLM."""

import asyncio
import inspect
import itertools
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_tensorrt_llm.cache import PrefixCache
from fake_tensorrt_llm.knobs import knobs
from fake_tensorrt_llm.prompts import PromptReader
from fake_tensorrt_llm.request import RequestOutput
from fake_tensorrt_llm.statistics import Executor, Queues, taken
from fake_tensorrt_llm.tables import VersionTable
from fake_tensorrt_llm.transfers import FABRIC, Transfers, next_context_id, node_of
from fake_tensorrt_llm.values import RequestError

RUNNING: list["LLM"] = []
_DRAFT = (3, 1, 2)  # what speculative decoding has guessed at the end of a prompt


class LLM:
    """Accepts what `args_type` accepts; `table` and the types are set by the subclass of a version."""

    table: VersionTable
    args_type: type[Any]
    params_type: type

    def __init__(self, model: str, tokenizer: Any = None, **arguments: Any) -> None:
        if unknown := sorted(set(arguments) - set(self.args_type.model_fields)):
            raise ValueError(f"LLM got invalid argument: {unknown[0]}")
        self.given = arguments
        self.args = self.args_type(model=model, tokenizer=tokenizer, **arguments)
        self._knobs = knobs()
        self._reader = PromptReader(Path(model))
        kv = self.args.kv_cache_config
        self._block_tokens = kv.tokens_per_block
        self.blocks = (kv.max_tokens or 2**20) // self._block_tokens
        self.blocks_free = self.blocks
        is_split = getattr(self.args, "enable_attention_dp", False)
        ranks = range(self.args.tensor_parallel_size) if is_split else (None,)
        self.caches = [PrefixCache(kv, rank, is_v2=self.table.second_cache_manager) for rank in ranks]
        self._turns = itertools.count()
        self._queues = Queues(len(self.caches))
        self._executor = Executor()
        self.telling_fails: Exception | None = None
        self._waiting: list[RequestOutput] = []
        self._batch: list[RequestOutput] = []
        self._loop: asyncio.Task[None] | None = None
        self.crash: Exception | None = None
        self.sick = False
        self.down = False
        self.has_run = False
        self.frozen = False
        self.shutdown_seconds = 0.0
        self.abort_fails: Exception | None = None
        self.fetch_seconds = self._knobs.fetch_seconds
        self.asked: list[Any] = []
        self.refuses: Exception | None = None
        self.is_silent = False
        self.hides_end_of_prefill = False
        self.salts: list[str | None] = []
        self.drafts: list[list[int] | None] = []
        self.requests = 0
        self.spans: list[str] = []
        self._transfers = Transfers(self._knobs.fabric)
        self._tokens = 0
        self.step_seconds = self._knobs.step_seconds
        self.tokens_added: tuple[int, ...] = ()
        RUNNING.append(self)

    @property
    def cache(self) -> PrefixCache:
        """Of the first rank."""
        return self.caches[0]

    @property
    def is_busy(self) -> bool:
        """True if anything is in its batch."""
        return bool(self._batch)

    @property
    def iterations(self) -> int:
        """The number of steps with work."""
        return self._queues.iteration

    def shutdown(self) -> None:
        """Forgets everything."""
        time.sleep(self.shutdown_seconds)
        self.down = True
        for request in [*self._waiting, *self._batch]:
            request.cancel()
        if self in RUNNING:
            RUNNING.remove(self)

    def _check_health(self) -> bool:
        return not (self.down or self.sick or self.crash)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Statistics of iterations, empty before the first submission."""
        if self.telling_fails is not None:
            raise self.telling_fails
        if self.table.reads_at_once:
            return taken(self._queues.stats)
        if self._executor._iter_stats_result is None:
            return []
        return self._executor._iter_stats_result.get_results(timeout or 0.0, lambda: self.down)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Events of the prefix caches of all ranks."""
        if self.telling_fails is not None:
            raise self.telling_fails
        if self.table.reads_at_once:
            return [event for cache in self.caches for event in taken(cache.events)]
        assert self._executor._iter_kv_events_result is not None, "KV Event IterationResult is not instantiated."
        others = [event for cache in self.caches[1:] for event in taken(cache.events)]
        return [*self._executor._iter_kv_events_result.get_results(timeout or 0.0, lambda: self.down), *others]

    def generate_async(self, inputs: Any, **arguments: Any) -> RequestOutput:
        """Queues it."""
        unknown = sorted(set(arguments) - set(self.table.generate))
        if unknown:
            raise TypeError(f"generate_async() got an unexpected keyword argument '{unknown[0]}'")
        if self.refuses is not None:
            raise self.refuses
        if self.down:
            raise RuntimeError("LLM is shutting down")
        request = self._request(
            inputs,
            arguments["sampling_params"],
            arguments.get("disaggregated_params"),
            arguments.get("cache_salt"),
        )
        self.requests += 1
        self.asked.append(replace(arguments["sampling_params"]))
        request.engine = weakref.ref(self)
        request.trace_headers = arguments.get("trace_headers") or {}
        request.rank = self._rank(arguments.get("scheduling_params"))
        request.submitted = time.monotonic()
        self.salts.append(request.salt)
        if self.args.speculative_config is not None and (request.params.logprobs or request.params.min_p):
            request.put(RequestError("min_p and log probabilities are not supported with speculative decoding"))
            return request
        self._waiting.append(request)
        self._executor.expect_more(self._queues.stats, self.cache.events)
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._run())
        return request

    def _rank(self, scheduling: Any) -> int:
        if scheduling is None or scheduling.attention_dp_rank is None or scheduling.attention_dp_relax:
            return next(self._turns) % len(self.caches)
        if scheduling.attention_dp_rank >= len(self.caches):
            raise ValueError(f"attention_dp_rank {scheduling.attention_dp_rank} is out of range")
        return int(scheduling.attention_dp_rank)

    def _request(self, inputs: Any, params: Any, handoff: Any, salt: str | None) -> RequestOutput:
        if self.args.skip_tokenizer_init and params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id")
        if handoff is not None and handoff.request_type == "generation_only":
            self._check_generation_only(handoff)
        read = self._reader.read(inputs, handoff)
        context = (*read.token_ids, *self.tokens_added)
        request = RequestOutput(context, params, handoff, 0)
        request.read = read
        request.salt = salt
        kind = request.kind
        if kind == "context_only":
            self._check_context_only()
            params.max_tokens = 1
        if (
            kind != "generation_only"
            and len(context) > self.args.max_num_tokens
            and not self.args.enable_chunked_prefill
        ):
            raise RequestError(f"The prompt length ({len(context)}) exceeds max_num_tokens")
        request.blocks = -(-(len(context) + params.max_tokens) // self._block_tokens)
        return request

    def _check_context_only(self) -> None:
        if not self.args.cache_transceiver_config:
            raise ValueError("Disaggregated serving is not enabled, please check the configuration.")
        if not self.table.overlaps_on_prefill and not self.args.disable_overlap_scheduler:
            raise ValueError("Context only requests are not supported in pytorch backend when overlap is enabled")

    def _check_generation_only(self, handoff: Any) -> None:
        if not self.args.cache_transceiver_config:
            raise ValueError("Disaggregated serving is not enabled, please check the configuration.")
        if handoff.multimodal_embedding_handles is not None:
            raise ValueError("not supported for generation-only mode")
        if self.args.speculative_config:
            # They are padded where they are missing, so nothing tells but the speed.
            self.drafts.append(handoff.draft_tokens)

    async def _run(self) -> None:
        while not self.down:
            await asyncio.sleep(self.step_seconds)
            self.blocks_free += self._transfers.take_freed()
            if self.crash:
                self._fail(self.crash)
            if not self.frozen:
                self._admit()
                self._note(self._step())

    def _fail(self, error: Exception) -> None:
        for request in [*self._waiting, *self._batch]:
            request.put(error)
        self._waiting, self._batch = [], []

    def _admit(self) -> None:
        for request in self._waiting:
            request.fetching_since = request.fetching_since or time.monotonic()
        for request in [request for request in self._waiting if request.aborted]:
            self._waiting.remove(request)
            if self.table.answers_waiting_aborts:
                request.cancel()
            if request.kind == "generation_only":
                self.crash = RuntimeError("a request was aborted in the middle of a transfer")
        while self._waiting and len(self._batch) < self.args.max_batch_size:
            request = self._waiting[0]
            if request.blocks > self.blocks_free or not self._ready(request):
                return
            self.blocks_free -= request.blocks
            if request.kind != "generation_only":
                self._begin_prompt(request)
            self._batch.append(self._waiting.pop(0))

    def _begin_prompt(self, request: RequestOutput) -> None:
        request.meaning, key = self._reader.opened(request.read)
        cache = self.caches[request.rank]
        request.reused_blocks = cache.reused(key, request.salt)
        request.cached_tokens = request.reused_blocks * self._block_tokens
        cache.store(key, request.salt)
        request.computed_at = time.monotonic() + self._knobs.prompt_seconds * len(key) / 1000

    def _ready(self, request: RequestOutput) -> bool:
        """True if its KV has arrived. If it never does, no request behind it runs either."""
        if request.kind != "generation_only" or request.fetched:
            return True
        if time.monotonic() - request.fetching_since < self.fetch_seconds:
            return False
        meaning = self._transfers.fetch(_context_id(request.handoff))
        if meaning is None:
            if time.monotonic() - request.submitted > self._timeout_seconds():
                request.put(RequestError("KV cache transfer timed out"))
                self._waiting.remove(request)
            return False
        request.fetched = True
        # An answer follows from the KV that was fetched, and not from the ids that it is said to be of.
        request.meaning = meaning
        self._replay(request)
        return True

    def _replay(self, request: RequestOutput) -> None:
        output, handoff = request.outputs[0], request.handoff
        output.token_ids.extend(handoff.first_gen_tokens or [])
        request.skips_a_step = True
        if request.params.logprobs:
            output.logprobs.extend(handoff.first_gen_log_probs or [])
        request.put()

    def _note(self, stepped: int) -> None:
        """One iteration's statistics; without work there is none."""
        if not (stepped and self.args.enable_iter_perf_stats):
            return
        lengths = [len(request.prompt_token_ids) for request in self._waiting]
        self._queues.note(len(self._batch), lengths, self.blocks, self.blocks - self.blocks_free)

    def _step(self) -> int:
        stepped, sampled = len(self._batch), 0
        for request in list(self._batch):
            if request.aborted:
                self._leave(request)
                request.cancel()
                continue
            if time.monotonic() < request.computed_at:
                continue
            if request.skips_a_step:
                # The first token was sent ahead of the overlapped iteration that follows it.
                request.skips_a_step = False
                continue
            self._wear(1)
            request.step(self._reader.vocab_size, row=sampled if self._knobs.noise_by_row else 0)
            sampled += request.params.temperature != 0
            self.has_run = True
            if request.finished and request.kind == "context_only" and request.outputs[0].finish_reason == "length":
                self._commit(request)
            elif request.finished:
                self._leave(request)
                if self.hides_end_of_prefill and request.kind == "context_only":
                    request.outputs[0].token_ids.clear()
            if request.finished and self.args.return_perf_metrics:
                request.report()
                if self.args.otlp_traces_endpoint:
                    self.spans.append(request.trace_headers.get("traceparent", ""))
            if request.finished or not self.is_silent:
                request.put()
        return stepped

    def _wear(self, tokens: int) -> None:
        """Breaks when it is to."""
        self._tokens += tokens
        if self._knobs.crash_after_tokens and self._tokens >= self._knobs.crash_after_tokens:
            self.crash = RuntimeError("CUDA error: an illegal memory access was encountered")
        if self._knobs.freeze_after_tokens and self._tokens >= self._knobs.freeze_after_tokens:
            self.frozen = True

    def _leave(self, request: RequestOutput) -> None:
        self._batch.remove(request)
        self.blocks_free += request.blocks

    def _commit(self, request: RequestOutput) -> None:
        """Holds its KV until it is fetched or the time is over, whatever happens to the request."""
        self._batch.remove(request)
        output = request.outputs[0]
        number = getattr(request.handoff, "disagg_request_id", None) or next_context_id()
        self._transfers.commit(number, request.blocks, self._timeout_seconds(), request.meaning)
        fields = {
            "request_type": "context_only",
            "first_gen_tokens": list(output.token_ids),
            "ctx_request_id": number,
            "disagg_request_id": number,
            **self._location(request),
            "first_gen_log_probs": list(output.logprobs) or None,
            "draft_tokens": list(_DRAFT) if self.args.speculative_config else None,
            "ctx_usage": {"prompt_tokens": len(request.prompt_token_ids)},
            "conversation_id": request.handoff.conversation_id if "conversation_id" in self.table.handoff else None,
        }
        known = {name: value for name, value in fields.items() if name in self.table.handoff}
        output.disaggregated_params = self.params_type(**known)

    def _location(self, request: RequestOutput) -> dict[str, Any]:
        """The KV's location: by an opaque state, or with the Python transceiver by an endpoint and a rank."""
        if getattr(self.args.cache_transceiver_config, "transceiver_runtime", None) == "PYTHON":
            return {"ctx_info_endpoint": "tcp://127.0.0.1:5555", "ctx_dp_rank": request.rank}
        return {"opaque_state": b"\x00state of " + self.table.version.encode()}

    def _timeout_seconds(self) -> float:
        return float((self.args.cache_transceiver_config.kv_transfer_timeout_ms or 10**12) / 1000)


def _context_id(handoff: Any) -> int:
    number = getattr(handoff, "disagg_request_id", None) or handoff.ctx_request_id
    if not isinstance(number, int):
        raise TypeError(f"ctx_request_id must be an integer, not {number!r}")
    return number


def llm_of(table: VersionTable, args_type: type[Any], params_type: type) -> type[LLM]:
    """LLM of one version, whose signatures say what it accepts."""
    found = type("LLM", (LLM,), {"table": table, "args_type": args_type, "params_type": params_type})

    def generate_async(self: LLM, *given: Any, **named: Any) -> RequestOutput:
        return LLM.generate_async(self, *given, **named)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required, optional = ("self", "inputs"), [name for name in table.generate if name != "inputs"]
    names = [
        *(inspect.Parameter(name, kind) for name in required),
        *(inspect.Parameter(name, kind, default=None) for name in optional),
    ]
    generate_async.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    found.generate_async = generate_async
    return found


__all__ = ["FABRIC", "LLM", "RUNNING", "llm_of", "next_context_id", "node_of"]
