"""Driving an engine through services/engine.py alone: collecting what it yields, and moving blocks between two."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from rpc.aio import timeout
from services.answer import Finished, TokenLogprob, Tokens
from services.engine import Engine
from services.kv import HeldKv, PulledKv, Reservation
from services.kv_elsewhere import HandedKv, MovesKv, MovingKv
from services.prompt import Prompt, Sampling

PATIENCE_SECONDS = 20.0

# The sizes of every engine under the contract. The pool holds two contexts and a half.
BLOCK_TOKENS = 16
CONTEXT_TOKENS = 256
BLOCKS = 40
MAX_WAITING = 12
MAX_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class Generated:
    """All that a generation yielded."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finished: Finished


async def collect(stream: AsyncGenerator[Tokens | Finished, None]) -> Generated:
    """Reads to the end; the last item must be the only Finished."""
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
    """The likeliest tokens, so many of them, past every end of sequence."""
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
    held: MovingKv, decode: MovesKv, following: Prompt, sampling: Sampling
) -> AsyncGenerator[Tokens | Finished, None]:
    """What an engine generates that fetches the KV itself; the other side is told that it has."""
    stream = await decode.take_over(HandedKv(following, held.num_tokens, held.engine_state), sampling)
    held.fetched()
    await held.release()
    return stream


async def disaggregated(
    prefill: Engine, decode: Engine, prompt: Prompt, sampling: Sampling, more: Sequence[int] = ()
) -> tuple[int, ...]:
    """The ids after the first: prefilled on one engine, decoded on the other; `more` are ids sent in the meantime."""
    held = await prefill.prefill(prompt, sampling)
    if held.finish_reason is not None:
        return ()
    following = replace(without_embeddings(prompt), emitted=(*prompt.emitted, held.first_token, *more))
    if isinstance(decode, MovesKv) and isinstance(held, MovingKv):
        return (await collect(await fetch(held, decode, following, sampling))).ids
    reservation = await decode.reserve(following, held.num_tokens)
    await pull(prefill, held, decode, reservation)
    return (await collect(decode.decode(PulledKv(following, reservation), sampling))).ids


def without_embeddings(prompt: Prompt) -> Prompt:
    """The prompt as a decode worker gets it beside a handoff."""
    return replace(prompt, media=tuple(replace(span, embedding=None) for span in prompt.media))


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that will come about by itself."""
    async with timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - an engine announces no changes
            await asyncio.sleep(0.001)


def blocks_used(engine: Engine) -> int:
    """Blocks in anybody's hands."""
    return engine.load().blocks_used
