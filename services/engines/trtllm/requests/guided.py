"""Guided decoding by TensorRT-LLM's own means."""

import re
from typing import Any

from baton.errors import Unsupported
from grammars.guide import Guide, GuideKind
from services.engines.prompt import Prompt, Sampling
from services.engines.trtllm.package import Package

# Only what has a meaning in expressions: re.escape also escapes spaces, which not every dialect reads.
_SPECIAL, _ESCAPED = re.compile(r"[.^$*+?{}\[\]\\|()]"), r"\\\g<0>"


def guided_decoding_params(package: Package, guide: Guide) -> Any:
    """Makes the engine's GuidedDecodingParams. Raises Unsupported for grammars that it does not read."""
    make = package.llmapi.GuidedDecodingParams
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            return make(json=guide.text or '{"type": "object"}')
        case GuideKind.REGEX:
            return make(regex=guide.text)
        case GuideKind.CHOICE:
            return make(regex="|".join(f"({_SPECIAL.sub(_ESCAPED, text)})" for text in guide.choices))
        case GuideKind.GRAMMAR if "::=" in guide.text:
            return make(grammar=guide.text)
        case _:
            raise Unsupported(f"{guide.field}: TensorRT-LLM takes schemas, expressions, choices and grammars in GBNF")


def check_beginning(prompt: Prompt, sampling: Sampling) -> None:
    """Raises Unsupported for a guided answer that has begun: the engine begins its grammar at the first id that it
    generates, except for the first id of a handoff, which it follows itself.
    """
    if sampling.guide is not None and prompt.emitted:
        raise Unsupported("guided: TensorRT-LLM cannot continue an answer inside its grammar")
