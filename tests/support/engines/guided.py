"""Answers of the embedded engine that follow a grammar."""

import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import jsonschema
import tokenizers
from support.engines.checkpoints import DEMO
from support.engines.schemas import Schema

from grammars.guide import Guide, GuideKind
from services.engines.answer import Finished, FinishReason, TokenLogprob, Tokens
from services.engines.base import Engine
from services.engines.prompt import Prompt, Sampling

TOKENIZER = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
PROMPT = Prompt(tuple(TOKENIZER.encode("Tell me about Mia.").ids))
GREEDY = Sampling(max_tokens=300, temperature=0.0)
SAMPLED = Sampling(max_tokens=300, temperature=1.0, seed=5)


@dataclass(frozen=True)
class Answer:
    """The ids that an engine generated."""

    ids: tuple[int, ...]
    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text without the end of the sequence."""
        return str(TOKENIZER.decode(self.ids, skip_special_tokens=True))


def by_schema(schema: Schema) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))


def by_regex(expression: str) -> Guide:
    return Guide(GuideKind.REGEX, expression)


async def answer(engine: Engine, guide: Guide, sampling: Sampling = GREEDY, prompt: Prompt = PROMPT) -> Answer:
    """The whole answer, without what `prompt` has of it already."""
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    async with aclosing(engine.decode(prompt, replace(sampling, guide=guide))) as events:
        async for event in events:
            match event:
                case Tokens():
                    ids, logprobs = ids + event.ids, logprobs + event.logprobs
                case Finished():
                    return Answer(ids, event.reason, logprobs)
    raise AssertionError("the stream has no end")


def check_json(text: str, schema: Schema) -> None:
    """Fails unless the text is JSON that is valid under the schema."""
    checker = jsonschema.FormatChecker()
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def cuts(count: int, most: int = 4) -> Sequence[int]:
    """A few of the places between `count` tokens."""
    return sorted({1 + index * (count - 2) // (most - 1) for index in range(most)}) if count > 2 else [1]
