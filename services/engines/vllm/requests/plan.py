"""The prompt that vLLM computes for a request, and the first tokens that the client has already.

vLLM's random numbers follow one another from the start of a request; they are no function of the position. So a sampled
answer that is continued runs again from its prompt: the tokens that the client has are computed once more, compared and
dropped. So does one with penalties on its output, since vLLM counts emitted tokens that are given to it as prompt. A
greedy answer continues behind its emitted tokens.
"""

from dataclasses import dataclass

from services.engines.prompt import Prompt, Sampling
from services.engines.vllm.requests.sampling import TokenBudget


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
