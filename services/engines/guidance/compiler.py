"""A request's grammar, compiled beside the event loop and cached.

The masks of a step, computed in a thread while the model runs.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from llguidance import LLExecutor, LLMatcher

from baton.errors import InvalidRequest
from grammars.guide import Guide
from grammars.source import PARSER_LIMITS, grammar_source, panics_refused, refusal
from grammars.tasks import GrammarThread
from runtime.clock import monotonic, thread_time
from services.engines.guidance.guidance import SLOW_SECONDS, Guidance, unfollowed
from services.engines.guidance.vocabulary import GrammarVocabulary

_CACHED = 64
_PART_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Followed:
    """The number of emitted tokens that a grammar has followed so far, and the time of the last part."""

    end: int
    seconds: float


class GrammarCompiler:
    """Compiles grammars for one vocabulary in a thread of its own; `close` ends it.

    There it also follows what a request has already emitted, for at most `replay_seconds`.
    """

    def __init__(self, vocabulary: GrammarVocabulary, replay_seconds: float = 10.0) -> None:
        self._vocabulary = vocabulary
        self._replay_seconds = replay_seconds
        self._thread = GrammarThread()
        self._executor = LLExecutor(1)
        # Of the thread: the least recently used first.
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()

    async def guidance(self, guide: Guide, emitted: Sequence[int]) -> Guidance:
        """Returns the state of a request that has already sent `emitted`, which the grammar must allow.

        Raises InvalidRequest for a grammar that cannot be compiled or followed in time, or does not allow `emitted`;
        Overloaded.
        """
        matcher = await self._thread.run(lambda: self._matcher(guide).deep_copy())
        done, seconds = 0, 0.0
        while done < len(emitted):
            # A part at a time, so that other requests need not wait for a slow grammar.
            part = await self._thread.run(partial(self._follow, matcher, guide, emitted, done))
            done, seconds = part.end, seconds + part.seconds
            if seconds > self._replay_seconds:
                reason = f"following the emitted tokens takes more than {self._replay_seconds:g} s"
                raise InvalidRequest.of(guide.field, unfollowed(reason))
        return Guidance(matcher, guide.field, self._vocabulary)

    def close(self) -> None:
        """Drops the grammars that wait."""
        self._thread.close()

    def _follow(self, matcher: LLMatcher, guide: Guide, emitted: Sequence[int], start: int) -> "_Followed":
        """Follows the tokens from `start` on, as many as there is time for, and at least one."""
        began = thread_time()  # not the time of other work on the machine
        for index in range(start, len(emitted)):
            # The mask first: computing it releases Python's lock, and then there is little left to do for the token.
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            token = emitted[index]
            is_allowed = mask[token // 8] >> token % 8 & 1
            if matcher.is_error():
                raise InvalidRequest.of(guide.field, unfollowed(matcher.get_error()))
            if not is_allowed or not self._executor.consume_token_par([(matcher, token)])[0]:
                raise InvalidRequest.of(f"emitted[{index}]", "is not allowed by the grammar in `guided`")
            if thread_time() - began > _PART_SECONDS:
                break
        return _Followed(index + 1, thread_time() - began)

    def _matcher(self, guide: Guide) -> LLMatcher:
        found = self._compiled.get(guide)
        if found is None:
            source = grammar_source(guide, self._vocabulary.special_id)
            with panics_refused(guide):
                found = LLMatcher(self._vocabulary.tokenizer, source, log_level=0, limits=PARSER_LIMITS)
            if found.is_error():
                raise refusal(guide, found.get_error())
            self._compiled[guide] = found
        self._compiled.move_to_end(guide)
        if len(self._compiled) > _CACHED:
            self._compiled.popitem(last=False)
        return found


_SECONDS_PER_MASK = 0.002  # of a step of many


class MaskThreads:
    """Computes the masks of the next tokens while the model computes their logits. Threads start at first use.

    A grammar whose masks are slow, such as an ambiguous one, must not hold up the steps of others: its masks are
    computed in a thread of their own, one request after the other, and its request is in no step until they are ready.
    """

    def __init__(self) -> None:
        self._steps = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._slow = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slow-masks")

    def begin(self, guided: Sequence[Guidance]) -> None:
        """Begins the masks of a step; `Guidance.mask` waits for them."""
        quick = [one for one in guided if one.compute_alone is None]
        if quick:
            job = self._steps.submit(self._compute, quick)
            for one in quick:
                one.expect(job)

    def _compute(self, guided: Sequence[Guidance]) -> None:
        together, suspects = [one for one in guided if not one.is_suspect], [one for one in guided if one.is_suspect]
        began = monotonic()
        _compute_masks(together, self._executor)
        is_slow = monotonic() - began > SLOW_SECONDS + len(together) * _SECONDS_PER_MASK
        # Times are not known by request: the next masks tell, each by itself.
        for one in together:
            one.is_suspect = is_slow
        for one in suspects:
            self._compute_one(one, self._executor)

    def _begin_alone(self, one: Guidance) -> "Future[None]":
        return self._slow.submit(self._compute_one, one, self._slow_executor)

    def _compute_one(self, one: Guidance, executor: LLExecutor) -> None:
        began = monotonic()
        is_able = one.catch_up(executor)
        seconds, began = monotonic() - began, thread_time()
        if is_able:
            words = np.zeros_like(one.words)
            # In this thread, so that its time counts and not that of other work on the machine.
            one.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if one.matcher.is_error():
                one.fail(one.matcher.get_error())
            one.words = words
        one.record(seconds + thread_time() - began, self._begin_alone)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    @cached_property
    def _slow_executor(self) -> LLExecutor:
        return LLExecutor(1)


def _compute_masks(guided: Sequence[Guidance], executor: LLExecutor) -> None:
    able = [one for one in guided if one.catch_up(executor)]
    if not able:
        return
    masks = np.zeros((len(able), able[0].words.size), dtype=np.uint32)
    rows = [(one.matcher, row) for row, one in enumerate(able)]
    # In parallel, without the interpreter's lock.
    executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(able))
    for one, words in zip(able, masks, strict=True):
        if one.matcher.is_error():
            one.fail(one.matcher.get_error())
        one.words = words
