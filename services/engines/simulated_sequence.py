"""One request inside the simulated engine: its ids, its blocks, its clock, and what its reader has not seen yet."""

import asyncio
import time
from collections.abc import Sequence as Items

from rpc.errors import BatonError
from services.answer import Finished, FinishReason, TokenLogprob, Tokens
from services.engines.simulated_blocks import link_hash, root_hash
from services.engines.simulated_images import media_bytes
from services.engines.simulated_tokens import TokenStream
from services.prompt import Prompt, Sampling


class Sequence:
    """`computed` of `ids` have their KV in `blocks`; `hashes` are of the full blocks, also of those yet to compute."""

    def __init__(self, prompt: Prompt, sampling: Sampling, stream: TokenStream, block_tokens: int) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.ids = list(prompt.context)
        self.blocks: list[int] = []
        self.computed = 0
        self.cached_tokens: int | None = None
        self.held = False
        self.output: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None
        self.error: BatonError | None = None
        self.changed = asyncio.Event()
        self.clock = Clock()
        self._stream = stream
        self._block_tokens = block_tokens
        self.hashes = chain(prompt, self.ids, block_tokens)
        stream.see(media_bytes(prompt.media, 0, len(self.ids)))
        stream.extend(self.ids)

    @property
    def missing(self) -> int:
        """Tokens without KV. One is what every step of decoding begins with."""
        return len(self.ids) - self.computed

    @property
    def generated(self) -> int:
        """Ids generated in the whole request, here and before."""
        return len(self.ids) - len(self.prompt.token_ids)

    @property
    def gives_way(self) -> bool:
        """Whether it may be made to give its blocks back, to be run again later."""
        return not self.held and self.prompt.is_computable

    @property
    def decoding(self) -> bool:
        """Whether a step is one token for one token: the prompt is done, or was pulled."""
        return self.missing == 1 and not self.held

    def adopt(self, blocks: Items[int], num_tokens: int, cached_blocks: int) -> None:
        """Begins from KV that others have computed."""
        self.blocks, self.computed = list(blocks), num_tokens
        self.cached_tokens = cached_blocks * self._block_tokens

    def start(self) -> None:
        """Joins the batch. What is cached by then is what the request is told of, also after a preemption."""
        if self.cached_tokens is None:
            self.cached_tokens = self.computed
        self.clock.start()
        if self.decoding:
            self.clock.decode()

    def learn(self, index: int, block_hash: bytes) -> None:
        """Remembers the hash of a block that has become full."""
        if index == len(self.hashes):
            self.hashes.append(block_hash)

    def grow(self) -> int:
        """Generates the next id."""
        self.clock.decode()
        token_id = self._stream.next()
        self._stream.extend((token_id,))
        self.ids.append(token_id)
        self.output.append(token_id)
        return token_id

    def previous_hash(self, index: int) -> bytes:
        """What the hash of block `index` continues."""
        return self.hashes[index - 1] if index else root_hash(self.prompt.cache_salt)

    def content_hash(self, index: int, num_tokens: int) -> bytes:
        """What block `index` is to contain when `num_tokens` of the context have their KV."""
        start = index * self._block_tokens
        end = min(start + self._block_tokens, num_tokens)
        return link_hash(self.previous_hash(index), self.ids[start:end], media_bytes(self.prompt.media, start, end))

    def take(self) -> Tokens | None:
        """What the reader has not seen yet."""
        if not self.output:
            return None
        tokens = Tokens(tuple(self.output), tuple(self.logprobs))
        self.output, self.logprobs = [], []
        return tokens

    def finished(self) -> Finished:
        """The last event. Only after `finish` is set."""
        assert self.finish is not None
        return Finished(
            reason=self.finish,
            prompt_tokens=len(self.prompt.token_ids),
            cached_tokens=min(self.cached_tokens or 0, len(self.prompt.token_ids)),
            queue_seconds=self.clock.queue_seconds,
            prefill_seconds=self.clock.prefill_seconds,
            decode_seconds=self.clock.decode_seconds,
        )


class Clock:
    """When a sequence was accepted, began to compute, and had its prompt done."""

    def __init__(self) -> None:
        self._accepted = time.monotonic()
        self._started: float | None = None
        self._decoding: float | None = None

    def start(self) -> None:
        """The first step begins. Counts once, also where the sequence is run again after a preemption."""
        self._started = self._started or time.monotonic()

    def decode(self) -> None:
        """The prompt is done."""
        self._decoding = self._decoding or time.monotonic()

    @property
    def queue_seconds(self) -> float:
        return (self._started or time.monotonic()) - self._accepted

    @property
    def prefill_seconds(self) -> float:
        return self._decoding - self._started if self._started and self._decoding else 0.0

    @property
    def decode_seconds(self) -> float:
        return time.monotonic() - self._decoding if self._decoding else 0.0


def chain(prompt: Prompt, ids: Items[int], block_tokens: int) -> list[bytes]:
    """The hashes of the full blocks of `ids`, which the prompt's context begins with."""
    hashes: list[bytes] = []
    previous = root_hash(prompt.cache_salt)
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        end = start + block_tokens
        previous = link_hash(previous, ids[start:end], media_bytes(prompt.media, start, end))
        hashes.append(previous)
    return hashes
