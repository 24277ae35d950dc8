"""Which drafts a step confirms: those that would have been sampled.

The tokens of a step depend on seed and position alone (sampling/gumbel.py), so each position after a draft is sampled
with its own noise. As long as the sampled token is the draft, the next position was computed from the right tokens. The
ids are therefore those of decoding one by one, greedy or sampled, and not only equal in distribution.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.sampling.sampling import Chosen, SamplerState


def sampled_positions(chunks: Sequence[Chunk]) -> list[SamplerState]:
    """Returns the state of each row of logits, as it is if all drafts before it are confirmed."""
    return [state for chunk in chunks for state in _states(chunk)]


def confirmed(chunk: Chunk, rows: Iterator[Chosen]) -> Chosen:
    """Takes the chunk's rows, and returns its first token, with those after confirmed drafts in `more`.

    A row that is not a number fails the request, also after a wrong draft: its KV must not stay in a block.
    """
    first = next(rows)
    if not chunk.drafts:
        return first
    others = [next(rows) for _ in chunk.drafts]
    if any(other.token_id is None for other in others):
        return Chosen(None)
    more: list[Chosen] = []
    newest = first
    for draft, other in zip(chunk.drafts, others, strict=True):
        if newest.token_id != draft:
            break
        more.append(other)
        newest = other
    return replace(first, more=tuple(more))


def _states(chunk: Chunk) -> Iterator[SamplerState]:
    state, drafts = chunk.sequence.sampler, chunk.drafts
    yield state
    for count in range(1, len(drafts) + 1):
        yield state.ahead(drafts[:count])
