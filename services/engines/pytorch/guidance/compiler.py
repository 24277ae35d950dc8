"""A request's grammar, compiled beside the event loop and cached."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import numpy as np
from llguidance import LLExecutor, LLMatcher

from baton.errors import InvalidRequest
from grammars.checking import PARSER_LIMITS, refusal
from grammars.guide import Guide
from grammars.source import grammar_source
from grammars.tasks import GrammarThread
from services.engines.pytorch.guidance.guidance import Guidance, unfollowed
from services.engines.pytorch.guidance.vocabulary import GrammarVocabulary

_CACHED = 64


class GrammarCompiler:
    """Compiles grammars for one vocabulary in a thread of its own; `close` ends it."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._thread = GrammarThread()
        self._executor = LLExecutor(1)
        # Of the thread: the least recently used first.
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()

    async def guidance(self, guide: Guide, emitted: Sequence[int]) -> Guidance:
        """Returns the state of a request that has already sent `emitted`, which the grammar must allow.

        Raises InvalidRequest for a grammar that cannot be compiled in time, or does not allow `emitted`; Overloaded.
        """
        return await self._thread.run(partial(self._begin, guide, emitted))

    def close(self) -> None:
        """Drops the grammars that wait."""
        self._thread.close()

    def _begin(self, guide: Guide, emitted: Sequence[int]) -> Guidance:
        matcher = self._matcher(guide).deep_copy()
        for index, token in enumerate(emitted):
            # The mask first: computing it releases Python's lock, and then there is little left to do for the token.
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            is_allowed = mask[token // 8] >> token % 8 & 1
            if matcher.is_error():
                raise InvalidRequest.of(guide.field, unfollowed(matcher.get_error()))
            if not is_allowed or not self._executor.consume_token_par([(matcher, token)])[0]:
                raise InvalidRequest.of(f"emitted[{index}]", "is not allowed by the grammar in `guided`")
        return Guidance(matcher, guide.field, self._vocabulary)

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
