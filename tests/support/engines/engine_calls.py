"""Calls engines through services/engines/base.py alone: collects their events, and moves blocks between two."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from support.eventually import PATIENCE_SECONDS

from runtime.aio import timeout
from services.engines.answer import Finished, TokenLogprob, Tokens
from services.engines.base import Engine
from services.engines.kv import HeldKv, PulledKv, Reservation
from services.engines.kv_transfer import EngineHeldKv, RemoteKv, TransfersKv
from services.engines.prompt import Prompt, Sampling

# The sizes of every engine under the contract. The pool holds two contexts and a half.
BLOCK_TOKENS = 16
CONTEXT_TOKENS = 256
BLOCKS = 40
MAX_WAITING = 12
MAX_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class Generated:
    """Everything that a generation yielded."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finished: Finished


async def collect(stream: AsyncGenerator[Tokens | Finished, None]) -> Generated:
    """Reads to the end, and checks that only the last event is Finished."""
    items: list[Tokens | Finished] = []
    async with timeout(PATIENCE_SECONDS), aclosing(stream):
        async for item in stream:
            items.append(item)
    *tokens, finished = items
    assert isinstance(finished, Finished)
    assert all(isinstance(item, Tokens) for item in tokens)
    return Generated(
        tuple(token for item in tokens if isinstance(item, Tokens) for token in item.ids),
        tuple(report for item in tokens if isinstance(item, Tokens) for report in item.logprobs),
        finished,
    )


def greedy(max_tokens: int) -> Sampling:
    """Greedy sampling of `max_tokens` tokens, past every end of sequence."""
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def pull(source: Engine, held: HeldKv, target: Engine, reservation: Reservation) -> None:
    """Copies the held blocks that the reservation does not have, and releases them."""
    missing = slice(reservation.cached_blocks, None)
    arriving = b"".join(source.memory.read(held.block_ids[missing]))
    writer = target.memory.write(reservation.block_ids[missing])
    start = 0
    for view in writer.views:
        view[:] = arriving[start : start + len(view)]
        start += len(view)
    writer.commit()
    await held.release()


async def fetch(
    held: EngineHeldKv, decode: TransfersKv, following: Prompt, sampling: Sampling
) -> AsyncGenerator[Tokens | Finished, None]:
    """Fetches KV by the engine's own transfer, and returns the generation; the other engine learns that
    it was fetched.
    """
    stream = await decode.decode_remote(RemoteKv(following, held.num_tokens, held.engine_state), sampling)
    held.fetched()
    await held.release()
    return stream


async def disaggregated(
    prefill: Engine, decode: Engine, prompt: Prompt, sampling: Sampling, more: Sequence[int] = ()
) -> tuple[int, ...]:
    """Returns the ids after the first one: prefilled on one engine, decoded on the other. `more` are ids sent in
    between.
    """
    held = await prefill.prefill(prompt, sampling)
    if held.finish_reason is not None:
        return ()
    following = replace(without_embeddings(prompt), emitted=(*prompt.emitted, held.first_token, *more))
    if decode.kv_transfer is not None:
        assert isinstance(held, EngineHeldKv)
        return (await collect(await fetch(held, decode.kv_transfer, following, sampling))).ids
    reservation = await decode.reserve(following, held.num_tokens)
    await pull(prefill, held, decode, reservation)
    return (await collect(decode.decode(PulledKv(following, reservation), sampling))).ids


def without_embeddings(prompt: Prompt) -> Prompt:
    """Returns the prompt as a decode worker gets it with a handoff."""
    return replace(prompt, media=tuple(replace(span, embedding=None) for span in prompt.media))


def blocks_used(engine: Engine) -> int:
    """Returns the number of used blocks."""
    return engine.load().blocks_used
