"""Answers equal an independent reference, whatever happened to their workers, routers and connections."""

from dataclasses import replace
from typing import Any

from simulation.guided import END_ID, begins, follows
from simulation.invariants.base import Invariant
from simulation.plan import Request
from simulation.reference import prompt_of, reference, text_of_ids

# More answers than are kept for their readers. And how a resumption may end as any call may.
_MANY_PARKED, _LONG_SECONDS, _AFTER_SECONDS = 256, 30.0, 30.0
_MANY_BLOCKS, _FEW = 200, 2
_REFUSED = {"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED"}


class AnswersAreRight(Invariant):
    """The ids are a beginning of the reference, and all of it if the call ended well; the text is theirs. So are those
    of each other answer to the request.
    """

    def ended(self, result: Any) -> None:
        self._check(result, result.asked, result.ids, result.text)
        for number in range(1, result.asked.answers):
            ids, text = result.others.get(number, ([], ""))
            self._check(result, replace(result.asked, seed=result.asked.seed + number), ids, text)

    def _check(self, result: Any, asked: Request, ids: list[int], text: str) -> None:
        if text_of_ids(ids) != text:
            self.problem(f"{result.name}: the text {text!r} is not that of {ids!r}")
        expected = reference(asked)
        if ids != expected[: len(ids)]:
            self.problem(f"{result.name}: {text_of_ids(ids)!r} instead of {text_of_ids(expected)!r}")
        elif result.code == "OK" and len(ids) != len(expected):
            self.problem(f"{result.name}: ended well with {len(ids)} of {len(expected)} tokens")


class GuidedAnswersFollow(Invariant):
    """A guided answer is one of its grammar, or the beginning of one, of all of its tokens if it ended well."""

    def ended(self, result: Any) -> None:
        asked = result.asked
        if not asked.guided:
            return
        for ids, text in ((result.ids, result.text), *result.others.values()):
            is_cut = result.code != "OK" or len(ids) == asked.tokens
            if not (follows(asked.guided, text) if ids[-1:] == [END_ID] else is_cut and begins(asked.guided, ids)):
                self.problem(f"{result.name}: {text!r} is no answer by its grammar, of the kind {asked.guided}")


class ImagesAreTheirOwn(Invariant):
    """Two answers to one image, prompt and seed are equal, and answers to different images are not."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self._answers: dict[Any, list[int]] = {}

    def ended(self, result: Any) -> None:
        asked = result.asked
        # Guided ones may well be equal.
        if not asked.image or asked.guided or not result.ids:
            return
        key = (asked.prefix, asked.length, asked.seed)
        known = self._answers.setdefault(key, result.ids)
        count = min(len(known), len(result.ids))
        if known[:count] != result.ids[:count]:
            self.problem(f"{result.name}: {bytes(result.ids)!r} after {bytes(known)!r}")
        if len(result.ids) > len(known):
            self._answers[key] = result.ids
        for (prefix, *others), ids in self._answers.items():
            if (
                others == list(key[1:])
                and prefix // 3 == asked.prefix // 3
                and prefix != asked.prefix
                and count >= 16
                and ids[:16] == result.ids[:16]
            ):
                self.problem(f"{result.name}: the same answer as to another image")


class SequencesAreWhole(Invariant):
    """Messages are numbered from 0, without a gap, and one that ended well has a last one."""

    def ended(self, result: Any) -> None:
        if result.sequences != list(range(len(result.sequences))) and not result.resumptions:
            self.problem(f"{result.name}: messages {result.sequences}")
        if result.code == "OK" and result.finished is None:
            self.problem(f"{result.name}: ended well without its last message")


class UsageIsRight(Invariant):
    """The last message counts the tokens of prompt and answer as they were, and never more cached than there are."""

    def ended(self, result: Any) -> None:
        if result.finished is None:
            return
        usage, asked = result.finished.usage, result.asked
        tokens = asked.tokens * asked.answers
        if asked.guided:
            tokens = sum(len(reference(replace(asked, seed=asked.seed + number))) for number in range(asked.answers))
        if usage.completion_tokens != tokens:
            self.problem(f"{result.name}: {usage.completion_tokens} of {tokens} tokens are counted")
        if not asked.image and usage.prompt_tokens != len(prompt_of(asked)):
            self.problem(f"{result.name}: a prompt of {len(prompt_of(asked))} is counted as {usage.prompt_tokens}")
        if usage.cached_tokens > usage.prompt_tokens:
            self.problem(f"{result.name}: {usage.cached_tokens} of {usage.prompt_tokens} tokens are said to be cached")


class ResumptionsGoOn(Invariant):
    """An answer that its client resumes in time goes on at the first try, where nothing went wrong but its client."""

    def ended(self, result: Any) -> None:
        if self.world.chaos.disturbed(result.started, None, _AFTER_SECONDS):
            return
        wrong = [one for one in result.refusals if not self._is_explained(one, result.asked)]
        if wrong:
            self.problem(f"{result.name}: could not be resumed, by {', '.join(wrong)}")

    def _is_explained(self, refusal: str, asked: Any) -> bool:
        """True if the call ended as any call may, or if the answer was one of too many that wait for their readers."""
        code, _, reason = refusal.partition(" ")
        fleet = self.world.plan.fleet
        # An answer without a reader gives its room to requests that find none.
        has_room = fleet.blocks >= _MANY_BLOCKS and fleet.max_batch > _FEW and fleet.keep_parked >= _MANY_PARKED
        may_be_dropped = not has_room or asked.timeout < _LONG_SECONDS
        # That of an image is computed again, which needs its request: without it the call ends by EMBEDDING_LOST.
        lost = ("STREAM_LOST", "EMBEDDING_LOST") if asked.image else ("STREAM_LOST",)
        return code in _REFUSED or (may_be_dropped and reason in lost)
