"""One request's place in its grammar, and the mask of its next token."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from baton.errors import InvalidRequest
from grammars.source import is_panic
from services.engines.guidance.vocabulary import GrammarVocabulary

Words = NDArray[np.uint32]
"""A bit for each token, the lowest of a word first; set for those that are allowed."""

SLOW_SECONDS = 0.02
"""A mask that takes longer does not belong into a step: others would wait for it."""

_MASK_SECONDS = 30.0
_SLOWEST_SECONDS = 1.0  # of a mask that is computed by itself
_SLOW_MASKS_SECONDS = 10.0  # of all slow masks of one answer together


def unfollowed(reason: str) -> str:
    """The error of a grammar that a matcher cannot follow, of which the first line is for clients."""
    return f"cannot be followed further: {reason.partition(chr(10))[0]}"


class Guidance:
    """A request's grammar after the tokens so far.

    Belongs to the engine's thread, except between `expect` and `mask`, while a thread of the masks has it. Once its
    masks are slow, `compute_alone` begins the next one as soon as its token is known, outside of the steps.
    """

    def __init__(self, matcher: LLMatcher, field: str, vocabulary: GrammarVocabulary) -> None:
        self.matcher = matcher
        self.eos_token_ids = vocabulary.eos_token_ids
        self.failure: InvalidRequest | None = None
        self._field = field
        self._new: list[int] = []
        self._job: Future[None] | None = None
        self.compute_alone: Callable[[Guidance], Future[None]] | None = None
        self.is_suspect = False  # whether a step's masks were slow, and this one's may be the cause
        self._slow_seconds = 0.0
        self.words: Words = np.zeros(-(-vocabulary.size // 32), dtype=np.uint32)

    def append(self, token_id: int) -> None:
        """Records a sampled token; the grammar follows when the next mask is computed."""
        self._new.append(token_id)
        if self.compute_alone is not None:
            self._job = self.compute_alone(self)

    @property
    def awaits_mask(self) -> bool:
        """True if its mask is computed outside of the steps, and is not ready."""
        return self.compute_alone is not None and self._job is not None and not self._job.done()

    def record(self, seconds: float, compute_alone: "Callable[[Guidance], Future[None]]") -> None:
        """Notes how long a mask took that was computed by itself, which decides how the next one is computed."""
        self.is_suspect = False
        self.compute_alone = compute_alone if seconds > SLOW_SECONDS else None
        if self.compute_alone is None:
            return
        self._slow_seconds += seconds
        if seconds > _SLOWEST_SECONDS:
            self.fail(f"it is too ambiguous: a mask takes more than {_SLOWEST_SECONDS:g} s")
        elif self._slow_seconds > _SLOW_MASKS_SECONDS:
            self.fail(f"it is too ambiguous: its masks take more than {_SLOW_MASKS_SECONDS:g} s")

    def expect(self, job: "Future[None]") -> None:
        """Notes that `job` computes the mask of the next token into `words`."""
        self._job = job

    def catch_up(self, executor: LLExecutor) -> bool:
        """Follows the tokens sampled since the last mask. Returns whether the grammar can still be followed."""
        new, self._new = self._new, []
        # By the executor, since the matcher's own methods keep Python's lock.
        if self.failure is None and not all(executor.consume_token_par([(self.matcher, token)])[0] for token in new):
            self.fail(self.matcher.get_error() or "a sampled token is not allowed by it")
        return self.failure is None

    def allowed_ids(self) -> list[int]:
        """The tokens that may come next, in order, computed in this thread. Raises InvalidRequest if the grammar cannot
        be followed.
        """
        new, self._new = self._new, []
        is_able = all(self.matcher.consume_token(token) for token in new)
        mask = np.frombuffer(self.matcher.compute_bitmask() if is_able else b"", dtype=np.uint8)
        if not is_able or self.matcher.is_error():
            reason = self.matcher.get_error() or "a sampled token is not allowed by it"
            raise InvalidRequest.of(self._field, unfollowed(reason))
        ids: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        return ids

    def fail(self, reason: str) -> None:
        """Ends the request with an error at its next token."""
        self.failure = InvalidRequest.of(self._field, unfollowed(reason))

    def mask(self, banned: Iterable[int]) -> Words | None:
        """Waits for the mask of the next token. Returns None if there is none; `failure` then says why.

        Tokens of `banned` are not allowed either, unless the grammar allows no other.
        """
        assert self._job is not None
        try:
            self._job.result(_MASK_SECONDS)
        except FutureTimeout:
            self.fail(f"a mask took more than {_MASK_SECONDS:g} s")
        except (RuntimeError, ValueError) as error:  # of llguidance, for a reason that it does not report otherwise
            self.fail(str(error))
        except BaseException as error:
            if not is_panic(error):
                raise
            self.fail("its reader has failed")
        if self.failure is not None:
            return None
        rest = self.words.copy()
        for token in banned:
            rest[token // 32] &= ~np.uint32(1 << token % 32)
        return rest if rest.any() else self.words
