"""From prompts to what TensorRT-LLM is asked: checked against the limits, and refused where it would suffer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpc.errors import InvalidRequest, Overloaded, Unsupported
from services.engine import ModelFacts
from services.engines.media_checks import check_computable, check_media
from services.engines.trtllm.arguments import EngineArguments
from services.engines.trtllm.asking import Budget, sampling_params
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.illustration import Illustration, Illustrator
from services.engines.trtllm.package import Package
from services.engines.trtllm.running import Order
from services.prompt import Prompt, Sampling
from services.request_trace import current_traceparent


@dataclass(frozen=True, slots=True)
class Asked:
    """How a prompt is to be run: `params` for KV and embeddings that come or go."""

    sampling: Sampling
    budget: Budget
    params: Any = None
    illustration: Illustration | None = None
    replayed: int = 0


class Orders:
    """Writes the orders of one engine."""

    def __init__(
        self,
        config: TrtllmConfig,
        args: EngineArguments,
        package: Package,
        facts: ModelFacts,
        node: Callable[[], int],
    ) -> None:
        self._node = node
        self._config = config
        self._args = args
        self._package = package
        self._facts = facts
        self._illustrator = Illustrator(package, config.model)

    async def prefill(self, prompt: Prompt, sampling: Sampling, budget: Budget) -> Order:
        """One id, with the KV held for others if more are to follow."""
        illustration = await self._illustrate(prompt)
        params = self._context_only(illustration) if budget.max_tokens > 1 else self._embeddings(illustration)
        first = Budget(1, min(1, budget.min_tokens))
        return self._order(prompt, Asked(sampling, first, params, illustration))

    async def whole(self, prompt: Prompt, sampling: Sampling, budget: Budget) -> Order:
        """The prompt and its answer, here."""
        illustration = await self._illustrate(prompt)
        return self._order(prompt, Asked(sampling, budget, self._embeddings(illustration), illustration))

    def following(self, prompt: Prompt, sampling: Sampling, params: Any) -> Order:
        """An answer whose first id is known, from KV that `params` lead to."""
        return self._order(prompt, Asked(sampling, self.budget(prompt, sampling), params, replayed=1))

    def budget(self, prompt: Prompt, sampling: Sampling) -> Budget:
        """What is left of the request's, and of the context."""
        room = self._facts.max_context_tokens - len(prompt.context)
        left = sampling.max_tokens - len(prompt.emitted)
        return Budget(min(left, room), max(0, sampling.min_tokens - len(prompt.emitted)))

    def check(self, prompt: Prompt, *, is_computed: bool) -> None:
        """Raises InvalidRequest or Unsupported for what the engine would refuse too late, or not at all."""
        check_media(prompt, self._facts)
        if is_computed:
            check_computable(prompt)
        if prompt.cache_salt and "cache_salt" not in self._package.generate_arguments:
            raise Unsupported(f"TensorRT-LLM {self._package.version} has no cache_salt")
        if not prompt.token_ids:
            raise InvalidRequest.of("prompt", "has no tokens")
        if max(prompt.context) >= self._facts.vocab_size:
            raise InvalidRequest.of("prompt", f"{max(prompt.context)} is outside the vocabulary")
        self._check_length(len(prompt.context))

    def check_handoff(self, prompt: Prompt, sampling: Sampling, held_tokens: int) -> None:
        """Raises Unsupported where KV cannot leave, and Overloaded if too much waits to be fetched already."""
        self.check_transceiver()
        if sampling.logprobs is not None and "first_gen_log_probs" not in self._package.handoff_fields:
            raise Unsupported(f"TensorRT-LLM {self._package.version} cannot hand log probabilities over")
        limit = self._config.max_handoff_tokens
        if limit is not None and held_tokens + len(prompt.context) > limit:
            raise Overloaded(f"{held_tokens} tokens wait to be fetched; {limit} may", retry_after_seconds=1.0)

    def check_transceiver(self) -> None:
        """Raises Unsupported for a worker that runs whole requests only."""
        if not self._args.can_hand_over:
            raise Unsupported("cache_transceiver_config is unset: this worker runs whole requests only")

    def _check_length(self, tokens: int) -> None:
        limit, step = self._facts.max_context_tokens, self._args.max_num_tokens
        if tokens >= limit:
            raise InvalidRequest.of("prompt", f"leaves no room in a context of {limit} tokens")
        if tokens > step and not self._args.enable_chunked_prefill:
            raise InvalidRequest.of("prompt", f"is over max_num_tokens, {step}, and enable_chunked_prefill is off")

    async def _illustrate(self, prompt: Prompt) -> Illustration | None:
        return await asyncio.to_thread(self._illustrator.illustrate, prompt) if prompt.media else None

    def _embeddings(self, illustration: Illustration | None) -> Any:
        """Embeddings come by the same way as handoffs do."""
        if illustration is None:
            return None
        return self._package.disaggregated_params(request_type="context_and_generation", **illustration.fields)

    def _context_only(self, illustration: Illustration | None) -> Any:
        """Each time with a new id: one that is used twice is another request's KV."""
        fields = illustration.fields if illustration else {}
        params = self._package.disaggregated_params(request_type="context_only", **fields)
        if "disagg_request_id" in self._package.handoff_fields:
            params.disagg_request_id = self._package.new_handoff_id(self._node())
        return params

    def _order(self, prompt: Prompt, asked: Asked) -> Order:
        illustration = asked.illustration
        return Order(
            inputs=illustration.inputs if illustration else list(prompt.context),
            tokens=len(prompt.context),
            replayed=asked.replayed,
            logprobs=asked.sampling.logprobs,
            arguments={
                "sampling_params": sampling_params(
                    self._package, asked.sampling, asked.budget, self._facts.eos_token_ids
                ),
                "streaming": asked.params is None or asked.params.request_type != "context_only",
                "disaggregated_params": asked.params,
                "cache_salt": prompt.cache_salt or None,
                "scheduling_params": self._scheduling(prompt.data_parallel_rank),
                "trace_headers": self._trace_headers(),
            },
            keeps=illustration,
            reader_seconds=self._config.slow_reader_seconds,
        )

    def _scheduling(self, rank: int | None) -> Any:
        """Of an engine of one rank there is nothing to say."""
        return None if rank is None or self._facts.data_parallel_ranks == 1 else self._package.on_rank(rank)

    def _trace_headers(self) -> dict[str, str] | None:
        """So that the engine's own span is in the request's trace. A version without them merely has none."""
        traceparent = current_traceparent()
        known = "trace_headers" in self._package.generate_arguments
        return {"traceparent": traceparent} if traceparent and known else None
