"""Guided decoding by vLLM's structured outputs. Their backend is llguidance, as in our own engine."""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

from baton.errors import Unsupported
from grammars.guide import Guide, GuideKind
from grammars.source import check_guide, lark_source, may_spell_any, schema_source, unforced_source
from grammars.tasks import GrammarThread
from services.engines.prompt import Sampling

BACKEND = "guidance"
_REMEMBERED = 64


def structured_outputs(make: Any, guide: Guide, special_ids: Mapping[str, int]) -> Any:
    """Makes vLLM's StructuredOutputsParams, of its class. `special_ids` are the model's special tokens by name."""
    # vLLM's own tokenizer would make a special token of text that a grammar forces, and then refuse it.
    if may_spell_any(guide, special_ids):
        return make(grammar=unforced_source(guide, special_ids.get))
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            return make(json=schema_source(guide))
        case GuideKind.REGEX:
            return make(regex=guide.text)
        case GuideKind.CHOICE:
            return make(choice=list(guide.choices))
        case _:
            return make(grammar=lark_source(guide, special_ids.get))


def check_guided(sampling: Sampling) -> None:
    """Raises Unsupported for options with which vLLM would leave a complete grammar no token at all."""
    if sampling.guide is not None and (sampling.ignore_eos or sampling.min_tokens):
        raise Unsupported("guided: cannot be combined with ignore_eos or min_tokens on vLLM")


class GuideChecks:
    """Checks grammars before vLLM has them: it answers a wrong one with an empty text. The latest are remembered."""

    def __init__(self) -> None:
        self._thread = GrammarThread()
        self._right: OrderedDict[Guide, None] = OrderedDict()

    async def check(self, guide: Guide | None) -> None:
        """Raises InvalidRequest for a wrong grammar, and Overloaded if too many wait."""
        if guide is None:
            return
        if guide not in self._right:
            await self._thread.run(partial(check_guide, guide))
        self._right[guide] = None
        self._right.move_to_end(guide)
        if len(self._right) > _REMEMBERED:
            self._right.popitem(last=False)

    def close(self) -> None:
        """Drops the checks that wait."""
        self._thread.close()
