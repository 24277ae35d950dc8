"""Builds TensorRT-LLM's arguments for a request, after checking the request against the limits."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest, Overloaded, Unsupported
from baton.sampling_options import OPTIONS
from grammars.guide import Guide, GuideKind
from services.engines.base import ModelFacts
from services.engines.prompt import Prompt, Sampling
from services.engines.running.request_context import current_traceparent
from services.engines.trtllm.config import EngineArguments, TrtllmConfig
from services.engines.trtllm.package import Package
from services.engines.trtllm.requests.inflight import EngineRequest
from services.engines.trtllm.requests.multimodal import TrtllmProcessor, TrtllmPrompt

# Of the parameters that are left out where they are neutral: a version may lack them.
_NEUTRAL = {name: option.row.neutral for name, option in OPTIONS.items() if name not in ("temperature", "top_p")}
# What the samplers of speculative decoding have.
_SPECULATIVE = {"top_k", "seed"}


@dataclass(frozen=True, slots=True)
class Budget:
    """The most ids a request may still get, and the fewest before an end of sequence counts."""

    max_tokens: int
    min_tokens: int


def sampling_params(package: Package, sampling: Sampling, budget: Budget, eos_token_ids: Sequence[int]) -> Any:
    """Makes the engine's SamplingParams. Raises Unsupported with the parameters that this version lacks."""
    if sampling.logit_bias:
        raise Unsupported("sampling.params.logit_bias: the trtllm engine does not have it")
    if sampling.bad_sequences:
        raise Unsupported("sampling.bad_sequences: the trtllm engine does not have bad_words")
    end_id, *more_ends = eos_token_ids
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else more_ends)}
    wanted = {
        # The engine does not know its end of sequence without a tokenizer.
        "end_id": end_id,
        "pad_id": end_id,
        "max_tokens": budget.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "n": 1,
        "detokenize": False,
        "add_special_tokens": False,
        "ignore_eos": sampling.ignore_eos,
        "include_stop_str_in_output": True,
        **_if_unlike(sampling),
    }
    if stops:
        wanted["stop_token_ids"] = sorted(stops)
    if budget.min_tokens > 0:
        wanted["min_tokens"] = budget.min_tokens
    if sampling.logprobs is not None:
        # 0 would switch them off; 1 is the sampled token only.
        wanted["logprobs"] = max(1, sampling.logprobs)
    if sampling.guide is not None:
        wanted["guided_decoding"] = guided_decoding_params(package, sampling.guide)
    if unknown := sorted(set(wanted) - package.sampling_arguments):
        raise Unsupported(f"TensorRT-LLM {package.version} cannot sample by {', '.join(unknown)}")
    return package.sampling_params(**wanted)


def _if_unlike(sampling: Sampling) -> dict[str, Any]:
    """Returns the parameters that are not neutral."""
    return {name: getattr(sampling, name) for name, value in _NEUTRAL.items() if getattr(sampling, name) != value}


def unsupported(package: Package) -> tuple[str, ...]:
    """Returns the fields of SamplingParams for which this version has no parameter."""
    return tuple(sorted({"logit_bias", "bad_words", *(OPTIONS.keys() - package.sampling_arguments)}))


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a prompt's run. `params` are the DisaggregatedParams of KV and embeddings that arrive or leave."""

    sampling: Sampling
    budget: Budget
    params: Any = None
    multimodal: TrtllmPrompt | None = None
    replayed: int = 0


class RequestBuilder:
    """Builds the requests of one engine."""

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
        self._processor = TrtllmProcessor(package, config.model)

    async def prefill(self, prompt: Prompt, sampling: Sampling, budget: Budget) -> EngineRequest:
        """Returns a request for one id, whose KV is held for another worker if more ids follow."""
        check_beginning(prompt, sampling)
        multimodal = await self._process_media(prompt)
        params = self._context_only(multimodal) if budget.max_tokens > 1 else self._embeddings(multimodal)
        first = Budget(1, min(1, budget.min_tokens))
        return self._request(prompt, RequestOptions(sampling, first, params, multimodal))

    async def whole(self, prompt: Prompt, sampling: Sampling, budget: Budget) -> EngineRequest:
        """Returns a request for the whole answer. Raises Unsupported if a guided one has begun already."""
        check_beginning(prompt, sampling)
        multimodal = await self._process_media(prompt)
        return self._request(prompt, RequestOptions(sampling, budget, self._embeddings(multimodal), multimodal))

    def following(self, prompt: Prompt, sampling: Sampling, params: Any) -> EngineRequest:
        """Returns a request for the rest of an answer, from the KV that `params` locate."""
        return self._request(prompt, RequestOptions(sampling, self.budget(prompt, sampling), params, replayed=1))

    def budget(self, prompt: Prompt, sampling: Sampling) -> Budget:
        """Returns the rest of the request's budget, limited by the room in the context."""
        room = self._facts.max_context_tokens - prompt.num_tokens
        left = sampling.max_tokens - len(prompt.emitted)
        return Budget(min(left, room), max(0, sampling.min_tokens - len(prompt.emitted)))

    def check(self, prompt: Prompt, *, is_computed: bool) -> None:
        """Raises InvalidRequest or Unsupported for prompts that the engine would refuse too late or not at all."""
        assert prompt.is_computable or not is_computed
        if prompt.cache_salt and "cache_salt" not in self._package.generate_arguments:
            raise Unsupported(f"TensorRT-LLM {self._package.version} has no cache_salt")
        if not prompt.token_ids:
            raise InvalidRequest.of("prompt", "has no tokens")
        if max(prompt.context) >= self._facts.vocab_size:
            raise InvalidRequest.of("prompt", f"{max(prompt.context)} is outside the vocabulary")
        self._check_length(prompt.num_tokens)

    def check_handoff(self, prompt: Prompt, sampling: Sampling, held_tokens: int) -> None:
        """Raises Unsupported if KV cannot leave, and Overloaded if too much KV waits to be fetched already."""
        self.check_transceiver()
        if sampling.logprobs is not None and "first_gen_log_probs" not in self._package.handoff_fields:
            raise Unsupported(f"TensorRT-LLM {self._package.version} cannot hand log probabilities over")
        limit = self._config.max_handoff_tokens
        if limit is not None and held_tokens + prompt.num_tokens > limit:
            raise Overloaded(f"{held_tokens} tokens wait to be fetched; {limit} may", retry_after_seconds=1.0)

    def check_transceiver(self) -> None:
        """Raises Unsupported if this worker runs whole requests only."""
        if not self._args.can_hand_over:
            raise Unsupported("cache_transceiver_config is unset: this worker runs whole requests only")

    def _check_length(self, tokens: int) -> None:
        limit, step = self._facts.max_context_tokens, self._args.max_num_tokens
        if tokens >= limit:
            raise InvalidRequest.of("prompt", f"leaves no room in a context of {limit} tokens")
        if tokens > step and not self._args.enable_chunked_prefill:
            raise InvalidRequest.of("prompt", f"is over max_num_tokens, {step}, and enable_chunked_prefill is off")

    async def _process_media(self, prompt: Prompt) -> TrtllmPrompt | None:
        return await asyncio.to_thread(self._processor.process, prompt) if prompt.media else None

    def _embeddings(self, multimodal: TrtllmPrompt | None) -> Any:
        """Embeddings are passed the same way as handoffs."""
        if multimodal is None:
            return None
        return self._package.disaggregated_params(
            request_type="context_and_generation", **multimodal.fields(self._package.handoff_fields)
        )

    def _context_only(self, multimodal: TrtllmPrompt | None) -> Any:
        """Each request has a new id: an id that is used twice may fetch another request's KV."""
        fields = multimodal.fields(self._package.handoff_fields) if multimodal else {}
        params = self._package.disaggregated_params(request_type="context_only", **fields)
        if "disagg_request_id" in self._package.handoff_fields:
            params.disagg_request_id = self._package.new_handoff_id(self._node())
        return params

    def _check_speculative(self, sampling: Sampling) -> None:
        """Raises Unsupported for parameters that the samplers of speculative decoding refuse or ignore."""
        if self._args.speculative_config is None:
            return
        refused = ["logprobs"] if sampling.logprobs is not None else []
        refused += [name for name in _if_unlike(sampling) if name not in _SPECULATIVE]
        if refused:
            raise Unsupported(f"sampling: {', '.join(refused)} cannot be combined with speculative decoding")

    def _request(self, prompt: Prompt, options: RequestOptions) -> EngineRequest:
        self._check_speculative(options.sampling)
        multimodal = options.multimodal
        return EngineRequest(
            inputs=multimodal.inputs if multimodal else list(prompt.context),
            tokens=prompt.num_tokens,
            replayed=options.replayed,
            logprobs=options.sampling.logprobs,
            arguments={
                "sampling_params": sampling_params(
                    self._package, options.sampling, options.budget, self._facts.eos_token_ids
                ),
                "streaming": options.params is None or options.params.request_type != "context_only",
                "disaggregated_params": options.params,
                "cache_salt": prompt.cache_salt or None,
                "scheduling_params": self._scheduling(prompt.data_parallel_rank),
                "trace_headers": self._trace_headers(),
            },
            keeps=multimodal,
        )

    def _scheduling(self, rank: int | None) -> Any:
        """Returns the rank's parameters; None for an engine with one rank."""
        return None if rank is None or self._facts.data_parallel_ranks == 1 else self._package.on_rank(rank)

    def _trace_headers(self) -> dict[str, str] | None:
        """Returns the parent of the engine's own span; None for a version that takes no headers."""
        traceparent = current_traceparent()
        known = "trace_headers" in self._package.generate_arguments
        return {"traceparent": traceparent} if traceparent and known else None


# Only what has a meaning in expressions: re.escape also escapes spaces, which not every dialect reads.
_SPECIAL, _ESCAPED = re.compile(r"[.^$*+?{}\[\]\\|()]"), r"\\\g<0>"


def guided_decoding_params(package: Package, guide: Guide) -> Any:
    """Makes the engine's GuidedDecodingParams. Raises Unsupported for grammars that it does not read."""
    make = package.llmapi.GuidedDecodingParams
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            return make(json=guide.text or '{"type": "object"}')
        case GuideKind.REGEX:
            return make(regex=guide.text)
        case GuideKind.CHOICE:
            return make(regex="|".join(f"({_SPECIAL.sub(_ESCAPED, text)})" for text in guide.choices))
        case GuideKind.GRAMMAR if "::=" in guide.text:
            return make(grammar=guide.text)
        case _:
            raise Unsupported(f"{guide.field}: TensorRT-LLM takes schemas, expressions, choices and grammars in GBNF")


def check_beginning(prompt: Prompt, sampling: Sampling) -> None:
    """Raises Unsupported for a guided answer that has begun: the engine begins its grammar at the first id that it
    generates, except for the first id of a handoff, which it follows itself.
    """
    if sampling.guide is not None and prompt.emitted:
        raise Unsupported("guided: TensorRT-LLM cannot continue an answer inside its grammar")
