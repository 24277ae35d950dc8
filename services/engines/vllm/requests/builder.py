"""Checks requests against the model, and builds the arguments of vLLM's `generate`."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.errors import InvalidRequest, Unsupported
from grammars.source import special_token_ids
from services.engines.base import ModelFacts
from services.engines.prompt import Prompt, Sampling
from services.engines.running.request_context import current_traceparent
from services.engines.vllm.lora_slots import VllmLoraSlots
from services.engines.vllm.package import VllmPackage
from services.engines.vllm.requests.generation import VllmRequest
from services.engines.vllm.requests.media import check_last_position, multimodal_prompt
from services.engines.vllm.requests.sampling import Plan, TokenBudget, check_guided, check_sampling, sampling_params

# Blocks that come from another worker are cached under a salt that no other request has: until their owner has
# confirmed them they may be another request's, and another prompt here must not find them.
HANDOFF_SALT = "baton-handoff-"


@dataclass(frozen=True, slots=True)
class Budgeted:
    """The prompt that vLLM computes, and its budget of tokens."""

    plan: Plan
    budget: TokenBudget

    @property
    def is_handed_over(self) -> bool:
        """True if more tokens follow the one that a prefill generates."""
        return self.budget.max_tokens > len(self.plan.known) + 1


def seeded(sampling: Sampling) -> Sampling:
    """The sampling with a seed, since both sides of a handoff must choose the same first token."""
    if sampling.seed is not None or sampling.temperature == 0:
        return sampling
    return replace(sampling, seed=secrets.randbits(63))


class VllmRequestBuilder:
    """Builds the requests of one engine."""

    def __init__(self, package: VllmPackage, facts: ModelFacts, num_blocks: int, slots: VllmLoraSlots | None) -> None:
        self._package = package
        self._facts = facts
        self._slots = slots
        self._special_ids = special_token_ids(facts.files.tokenizer_json) if facts.guided_decoding else {}
        self._pool_tokens = num_blocks * facts.layout.block_tokens

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        """Raises InvalidRequest for a prompt or options that vLLM would change, or that would end its process."""
        check_sampling(sampling)
        check_guided(sampling)
        tokens = prompt.num_tokens
        if not prompt.token_ids:
            raise InvalidRequest.of("prompt", "is empty")
        if tokens >= self._facts.max_context_tokens:
            raise InvalidRequest.of("prompt", f"{tokens} tokens leave no room in {self._facts.max_context_tokens}")
        if tokens >= self._pool_tokens:
            raise InvalidRequest.of("prompt", f"{tokens} tokens do not fit the pool of {self._pool_tokens}")
        # vLLM without a tokenizer does not check them, and its process ends by an index out of range.
        if outside := next((each for each in prompt.context if not 0 <= each < self._facts.vocab_size), None):
            raise InvalidRequest.of("prompt", f"id {outside} is not within the vocabulary of {self._facts.vocab_size}")
        if prompt.lora is not None and self._slots is None:
            raise Unsupported("the engine is configured without adapters (engine.lora)")
        if prompt.media and self._facts.images is None:
            raise Unsupported(f"prompt.media: the model {self._facts.name!r} takes text only")

    def whole(self, prompt: Prompt, sampling: Sampling, computed: Budgeted) -> VllmRequest:
        """A request for the whole answer."""
        return self._request(prompt, sampling, computed, None, prompt.cache_salt)

    def prefill(self, prompt: Prompt, sampling: Sampling, computed: Budgeted) -> VllmRequest:
        """A request for the first token that is not known, whose KV is held if more tokens follow."""
        if computed.is_handed_over:
            check_last_position(prompt.media, len(computed.plan.prompt))
        known = len(computed.plan.known)
        first = replace(computed, budget=TokenBudget(known + 1, computed.budget.min_tokens))
        transfer = {"do_remote_decode": True} if computed.is_handed_over else None
        return self._request(prompt, sampling, first, transfer, prompt.cache_salt)

    def following(
        self, prompt: Prompt, sampling: Sampling, computed: Budgeted, transfer: Mapping[str, Any]
    ) -> VllmRequest:
        """A request that reads the KV of its prompt, and generates its first tokens once more."""
        check_last_position(prompt.media, len(computed.plan.prompt))
        salt = f"{HANDOFF_SALT}{secrets.token_hex(8)}"
        # The prompt is not computed here, and its log probabilities came with the first token.
        return self._request(prompt, replace(sampling, prompt_logprobs=None), computed, transfer, salt)

    def _request(
        self, prompt: Prompt, sampling: Sampling, computed: Budgeted, transfer: Mapping[str, Any] | None, salt: str
    ) -> VllmRequest:
        # vLLM without a tokenizer knows them from the checkpoint's generation configuration only, if there is one.
        ends = () if sampling.ignore_eos else self._facts.eos_token_ids
        stopping = replace(sampling, stop_token_ids=sampling.stop_token_ids.union(ends))
        inputs = self._inputs(prompt, computed.plan.prompt)
        if salt:
            inputs["cache_salt"] = salt
        arguments: dict[str, Any] = {
            "prompt": inputs,
            "sampling_params": sampling_params(self._package, stopping, computed.budget, transfer, self._special_ids),
        }
        if prompt.data_parallel_rank is not None and self._facts.data_parallel_ranks > 1:
            arguments["data_parallel_rank"] = prompt.data_parallel_rank
        if prompt.lora is not None and self._slots is not None:
            arguments["lora_request"] = self._slots.request(prompt.lora)
        if traceparent := current_traceparent():
            arguments["trace_headers"] = {"traceparent": traceparent}
        reported = len(prompt.token_ids)
        return VllmRequest(
            computed.plan, arguments, sampling.logprobs, sampling.prompt_logprobs, reported, prompt.is_computable
        )

    def _inputs(self, prompt: Prompt, token_ids: Sequence[int]) -> dict[str, Any]:
        if prompt.media and self._facts.images is not None:
            return multimodal_prompt(self._package, self._facts.images, prompt, token_ids)
        return {"prompt_token_ids": list(token_ids)}
