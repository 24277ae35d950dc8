"""Which sequences get drafts in a step, how many, and which drafts it confirms: those that would have been sampled.

The tokens of a step depend on seed and position alone (sampling/sampling.py), so each position after a draft is sampled
with its own noise. As long as the sampled token is the draft, the next position was computed from the right tokens. The
ids are therefore those of decoding one by one, greedy or sampled, and not only equal in distribution.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from services.engines.pytorch.config import SpeculationOptions
from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.sampling.sampling import Chosen, SamplerState
from services.engines.pytorch.sequence import TokenSequence

# Makes room for so many tokens more, as far as blocks are free; returns for how many there is room.
MakeRoom = Callable[[TokenSequence, int], int]


def can_draft(sequence: TokenSequence) -> bool:
    """True if each token of a sequence can be verified by itself: it depends on its position and on the tokens before
    it, through the model and the end of the answer (bad words) alone.

    Penalties depend on the history in another way, and so do grammars, so such requests get no drafts. Neither does a
    prefill: it ends after one token. Whatever else makes a token depend on more than its row of logits has to be
    refused here.
    """
    sampler = sequence.sampler
    return not (sequence.hold or sampler.penalises or sampler.guidance is not None)


class Drafter:
    """Adds drafts to the chunks of decoding sequences, unless there are too many to gain by it."""

    def __init__(self, options: SpeculationOptions, max_context_tokens: int) -> None:
        self._options = options
        self._max_context_tokens = max_context_tokens

    def extend(self, chunks: Sequence[Chunk], budget: int, make_room: MakeRoom) -> list[Chunk]:
        """Returns the chunks, each of one token, with at most `budget` draft tokens together."""
        if len(chunks) > self._options.max_sequences:
            return list(chunks)
        extended = []
        for chunk in chunks:
            drafts = self._drafts(chunk.sequence, budget, make_room) if chunk.samples else ()
            budget -= len(drafts)
            extended.append(replace(chunk, count=1 + len(drafts), drafts=drafts) if drafts else chunk)
        return extended

    def _drafts(self, sequence: TokenSequence, budget: int, make_room: MakeRoom) -> tuple[int, ...]:
        if not can_draft(sequence):
            return ()
        # After the drafts one more token is sampled.
        left = sequence.sampling.max_tokens - sequence.generated - 1
        limit = min(self._options.max_tokens, budget, left, self._max_context_tokens - len(sequence.tokens) - 1)
        drafts = sequence.drafts.propose(sequence.tokens, self._options.ngram, limit)
        return drafts[: make_room(sequence, len(drafts))] if drafts else ()


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
