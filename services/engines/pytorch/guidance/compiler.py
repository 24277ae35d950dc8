"""A request's grammar, compiled beside the event loop and cached."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from llguidance import LLExecutor, LLMatcher

from baton.errors import InvalidRequest
from grammars.guide import Guide
from grammars.source import PARSER_LIMITS, grammar_source, refusal
from grammars.tasks import GrammarThread
from services.engines.pytorch.guidance.guidance import Guidance, unfollowed
from services.engines.pytorch.guidance.vocabulary import GrammarVocabulary

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
        began = time.thread_time()  # not the time of other work on the machine
        for index in range(start, len(emitted)):
            # The mask first: computing it releases Python's lock, and then there is little left to do for the token.
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            token = emitted[index]
            is_allowed = mask[token // 8] >> token % 8 & 1
            if matcher.is_error():
                raise InvalidRequest.of(guide.field, unfollowed(matcher.get_error()))
            if not is_allowed or not self._executor.consume_token_par([(matcher, token)])[0]:
                raise InvalidRequest.of(f"emitted[{index}]", "is not allowed by the grammar in `guided`")
            if time.thread_time() - began > _PART_SECONDS:
                break
        return _Followed(index + 1, time.thread_time() - began)

    def _matcher(self, guide: Guide) -> LLMatcher:
        found = self._compiled.get(guide)
        if found is None:
            source = grammar_source(guide, self._vocabulary.special_id)
            found = LLMatcher(self._vocabulary.tokenizer, source, log_level=0, limits=PARSER_LIMITS)
            if found.is_error():
                raise refusal(guide, found.get_error())
            self._compiled[guide] = found
        self._compiled.move_to_end(guide)
        if len(self._compiled) > _CACHED:
            self._compiled.popitem(last=False)
        return found
