"""Our sampling parameters in vLLM's words, one to one; what vLLM would change silently is refused.

Guided decoding by vLLM's structured outputs. Their backend is llguidance, as in our own engine.

vLLM's random numbers follow one another from the start of a request; they are no function of the position. So a sampled
answer that is continued runs again from its prompt (Plan): the tokens that the client has are computed once more,
compared and dropped. So does one with penalties on its output, since vLLM counts emitted tokens that are given to it as
prompt. A greedy answer continues behind its emitted tokens.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from baton.errors import Unsupported
from baton.sampling_options import OPTIONS
from grammars.guide import Guide, GuideKind
from grammars.source import check_guide, lark_source, may_spell_any, schema_source, unforced_source
from grammars.tasks import GrammarThread
from services.engines.prompt import Prompt, Sampling
from services.engines.vllm.package import VllmPackage

BACKEND = "guidance"
_REMEMBERED = 64


def structured_outputs(make: Any, guide: Guide, special_ids: Mapping[str, int]) -> Any:
    """Makes vLLM's StructuredOutputsParams, of its class. `special_ids` are the model's special tokens by name."""
    # vLLM's own tokenizer would make a special token of text that a grammar forces, and then refuse it.
    if may_spell_any(guide, special_ids):
        return make(grammar=unforced_source(guide, special_ids.get))
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            return make(json=schema_source(guide))
        case GuideKind.REGEX:
            return make(regex=guide.text)
        case GuideKind.CHOICE:
            return make(choice=list(guide.choices))
        case _:
            return make(grammar=lark_source(guide, special_ids.get))


def check_guided(sampling: Sampling) -> None:
    """Raises Unsupported for options with which vLLM would leave a complete grammar no token at all."""
    if sampling.guide is not None and (sampling.ignore_eos or sampling.min_tokens):
        raise Unsupported("guided: cannot be combined with ignore_eos or min_tokens on vLLM")


class GuideChecks:
    """Checks grammars before vLLM has them: it answers a wrong one with an empty text. The latest are remembered."""

    def __init__(self) -> None:
        self._thread = GrammarThread()
        self._right: OrderedDict[Guide, None] = OrderedDict()

    async def check(self, guide: Guide | None) -> None:
        """Raises InvalidRequest for a wrong grammar, and Overloaded if too many wait."""
        if guide is None:
            return
        if guide not in self._right:
            await self._thread.run(partial(check_guide, guide))
        self._right[guide] = None
        self._right.move_to_end(guide)
        if len(self._right) > _REMEMBERED:
            self._right.popitem(last=False)

    def close(self) -> None:
        """Drops the checks that wait."""
        self._thread.close()


# vLLM raises lower ones to this, without a word.
LOWEST_TEMPERATURE = 0.01
_SEED_BITS = 63
# What vLLM names as we do, and the neutral value, which is left out.
_OPTIONS: Mapping[str, float | None] = {
    **{name: option.row.neutral for name, option in OPTIONS.items() if name not in ("temperature", "seed")},
    "logprobs": None,
    "prompt_logprobs": None,
}


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The most ids that vLLM may generate, and the fewest before an end of sequence counts."""

    max_tokens: int
    min_tokens: int


def check_sampling(sampling: Sampling) -> None:
    """Raises Unsupported for a value that vLLM would replace by another one, and for bad words."""
    if sampling.bad_sequences:
        raise Unsupported("sampling.bad_sequences: the vllm engine does not have bad_words")
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        given = f"{sampling.temperature} is between 0 and {LOWEST_TEMPERATURE}"
        raise Unsupported(f"sampling.params.temperature: {given}, to which vLLM would raise it; 0 is greedy")


def unsupported_options(package: VllmPackage) -> tuple[str, ...]:
    """Returns the fields of SamplingParams for which this version has no parameter."""
    lacking = {*OPTIONS, "logit_bias"} - package.sampling_arguments
    # vLLM takes bad words as texts, of which it makes ids itself; ids it has no parameter for.
    return tuple(sorted({"bad_words", *lacking}))


def sampling_params(
    package: VllmPackage,
    sampling: Sampling,
    budget: TokenBudget,
    transfer: Mapping[str, Any] | None = None,
    special_ids: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """Makes vLLM's SamplingParams; `transfer` are the parameters of a handoff, `special_ids` are for grammars.

    Raises InvalidRequest for a value that vLLM would change, and Unsupported for one that this version lacks.
    """
    check_sampling(sampling)
    wanted: dict[str, Any] = {
        "max_tokens": budget.max_tokens,
        "min_tokens": min(budget.min_tokens, budget.max_tokens),
        "temperature": sampling.temperature,
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
        "output_kind": package.output_kind.DELTA,
        **_options(sampling),
    }
    if sampling.guide is not None:
        wanted["structured_outputs"] = structured_outputs(package.structured_outputs, sampling.guide, special_ids)
    if transfer is not None:
        wanted["extra_args"] = {"kv_transfer_params": dict(transfer)}
    if unknown := sorted(set(wanted) - package.sampling_arguments):
        raise Unsupported(f"vLLM {package.version} cannot sample by {', '.join(unknown)}")
    return package.sampling_params(**wanted)


def _options(sampling: Sampling) -> dict[str, Any]:
    options = {name: value for name, neutral in _OPTIONS.items() if (value := getattr(sampling, name)) != neutral}
    if sampling.seed is not None and sampling.temperature > 0:
        options["seed"] = sampling.seed % 2**_SEED_BITS
    if sampling.logit_bias:
        options["logit_bias"] = dict(sampling.logit_bias)
    return options


@dataclass(frozen=True, slots=True)
class Plan:
    """vLLM's prompt, and the tokens that it must generate first, which are not yielded again."""

    prompt: tuple[int, ...]
    known: tuple[int, ...] = ()

    def budget(self, prompt: Prompt, sampling: Sampling, context_tokens: int) -> TokenBudget:
        """The tokens that vLLM generates, known ones included: up to the request's limit or the model's context."""
        before = len(self.prompt) - len(prompt.token_ids)
        most = min(sampling.max_tokens - before, context_tokens - len(self.prompt))
        return TokenBudget(most, max(0, sampling.min_tokens - before))


def must_run_again(sampling: Sampling) -> bool:
    """True if an answer can only be continued from its start: vLLM also begins a grammar there."""
    return (
        sampling.temperature > 0
        or sampling.guide is not None
        or bool(sampling.presence_penalty or sampling.frequency_penalty)
    )


def plan(prompt: Prompt, sampling: Sampling) -> Plan:
    """Returns how a prompt is computed, behind what was emitted already."""
    if prompt.emitted and must_run_again(sampling):
        return Plan(prompt.token_ids, prompt.emitted)
    return Plan(prompt.context)


def behind_emitted(prompt: Prompt) -> Plan:
    """Returns the plan for an answer whose tokens did not come again: it continues behind them, as another sample."""
    return Plan(prompt.context)
