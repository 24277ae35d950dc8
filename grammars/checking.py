"""Everything that can be wrong with a guide, found without a vocabulary."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from llguidance import LLMatcher, LLParserLimits

from baton.errors import InvalidRequest
from grammars.guide import Guide
from grammars.source import grammar_source

# Bounds of time and memory, in the units of llguidance: a compilation, and the mask of one token. They stop expressions
# and schemas that grow exponentially. Errors must not repeat the parser's state to the client.
PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

_LONGEST_ERROR = 500


def check_guide(guide: Guide) -> None:
    """Raises InvalidRequest naming the field, and in a schema the keyword. Slow: call it in a thread."""
    with panics_refused(guide):
        is_wrong, errors = LLMatcher.validate_grammar_with_warnings(grammar_source(guide), None, limits=PARSER_LIMITS)
    if is_wrong:
        raise refusal(guide, errors[0] if errors else "cannot be compiled")


@contextmanager
def panics_refused(guide: Guide) -> Iterator[None]:
    """Makes a refusal of a panic of llguidance, in which some wrong schemas end."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise InvalidRequest.of(guide.field, "cannot be compiled") from None


def is_panic(error: BaseException) -> bool:
    """True for a panic of compiled code, whose class is no Exception and cannot be imported."""
    return type(error).__name__ == "PanicException"


def refusal(guide: Guide, error: str) -> InvalidRequest:
    """The error for a guide that llguidance refuses."""
    # llguidance lists the special tokens by the names that it has for them.
    reason = re.sub("; following special tokens are available: [^\n]*", "", error)
    return InvalidRequest.of(guide.field, reason.strip()[:_LONGEST_ERROR])
