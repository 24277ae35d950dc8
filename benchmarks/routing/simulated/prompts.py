"""The prompts of a trace, shortened."""

from collections.abc import Sequence
from functools import lru_cache

from baton.engine.v1 import prompt_pb2
from benchmarks.routing.comparison import Plan
from devtools.bench.traces import BLOCK_TOKENS, TracedRequest
from router.routing.prefix.kv_index import block_keys


@lru_cache(maxsize=20_000)
def shortened(traced: TracedRequest, block_tokens: int) -> tuple[int, tuple[bytes, ...], list[int]]:
    """A traced prompt with blocks of `block_tokens`: its length, the hashes of its full blocks, and their keys."""
    last = traced.input_tokens - (len(traced.hash_ids) - 1) * BLOCK_TOKENS
    tokens = (len(traced.hash_ids) - 1) * block_tokens + max(1, last * block_tokens // BLOCK_TOKENS)
    hashes = tuple((number + 1).to_bytes(8, "little") for number in traced.hash_ids[: tokens // block_tokens])
    keys = block_keys(hashes)
    return tokens, hashes, keys


def answer_hashes(
    trace: Sequence[TracedRequest], block_tokens: int, plan: Plan
) -> dict[TracedRequest, tuple[bytes, ...]]:
    """The hashes of the blocks that answers fill: as the next prompt that continues a conversation has them.

    A trace does not say what an answer was. Whatever follows a prompt in the next turn is taken for its answer, so a
    worker that has computed both has the most that it could have.
    """
    found: dict[TracedRequest, tuple[bytes, ...]] = {}
    open_ends: dict[tuple[bytes, ...], TracedRequest] = {}
    for request in trace:
        _, hashes, _ = shortened(request, block_tokens)
        for count in range(len(hashes) - 1, 0, -1):
            before = open_ends.pop(hashes[:count], None)
            if before is not None:
                tokens = shortened(before, block_tokens)[0] + plan.answer_tokens(before)
                found[before] = hashes[count : tokens // block_tokens]
                break
        open_ends[hashes] = request
    return found


@lru_cache(maxsize=4096)
def prompt_of(tokens: int) -> prompt_pb2.Prompt:
    """Any prompt of this length."""
    return prompt_pb2.Prompt(token_ids=[0] * tokens)
