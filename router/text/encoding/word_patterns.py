r"""The words of a text, as byte-level tokenizers split it: the pieces that they encode one by one.

Each pattern of the library has one for Python's `re`, which splits ASCII text in the same way. In ASCII, \p{L} is
[A-Za-z], \p{Lu} [A-Z], \p{Ll} [a-z] and \p{N} [0-9], and there is no \p{M}, \p{Lt}, \p{Lm} or \p{Lo}. The library's
\s is [\t-\r ]; Python's has \x1c to \x1f besides. The alternatives are in the same order, since the first that matches
decides.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Splitter = Callable[[str], list[str]]

_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SYMBOL = r"[^\t-\r A-Za-z0-9]"
_SPACES = r"[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
_LINES_AND_SPACES = rf"[\t-\r ]*[\r\n]+|{_SPACES}"
_CASED = (
    rf"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+(?:{_CONTRACTION})?|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*(?:{_CONTRACTION})?"
    rf"|[0-9]{{1,3}}| ?{_SYMBOL}+[\r\n/]*|{_LINES_AND_SPACES}"
)

_GPT2 = rf"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?{_SYMBOL}+|{_SPACES}"
# Each digit ends the text before it, so spaces before it are all one word.
_GPT2_DIGITS = rf"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+|[0-9]| ?{_SYMBOL}+|[\t-\r ]+(?![^\t-\r 0-9])|[\t-\r ]+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{{1,3}}| ?{_SYMBOL}+[\r\n]*|{_LINES_AND_SPACES}"
_QWEN = rf"{_CONTRACTION}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?{_SYMBOL}+[\r\n]*|{_LINES_AND_SPACES}"
_MISTRAL = (
    r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*"
    rf"|[0-9]| ?{_SYMBOL}+[\r\n/]*|{_LINES_AND_SPACES}"
)

# Digits are cut out first. Control characters before no letter match nothing, and are a word until something matches.
_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_DEEPSEEK = (
    rf"{_PUNCTUATION}[A-Za-z]+|[\x00-\t\x0b\x0c\x0e- \x7f]?[A-Za-z]+|[0-9]{{1,3}}| ?{_PUNCTUATION}+[\r\n]*"
    r"|[\t-\r ]*[\r\n]+|[\t-\r ]+(?![^\t-\r 0-9])|[\t-\r ]+|[\x00-\x08\x0e-\x1f\x7f]+(?![A-Za-z])"
)

# The library's patterns, one applied after the other, as tokenizer.json has them, and ours.
PATTERNS: Mapping[tuple[str, ...], str] = {
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",): _GPT2,
    # Llama 3, GLM 4 and other models with the pattern of cl100k
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): _LLAMA3,
    # Qwen 2, 2.5 and 3
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): _QWEN,
    # Qwen 3.5
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): _QWEN,
    # GPT-4o and gpt-oss (o200k), Llama 4
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): _CASED,
    # Mistral's newer models (Tekken)
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): _MISTRAL,
    # DeepSeek V3 and R1
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): _DEEPSEEK,
}


def whole(text: str) -> list[str]:
    """Leaves a text whole."""
    return [text]


def splitter_of(pre_tokenizer: Mapping[str, Any]) -> Splitter | None:
    """The splitter of ASCII text that does as a pre-tokenizer, in the form of tokenizer.json; None if it is not known.

    It must map bytes to characters last, as `ByteLevel` does, and add nothing.
    """
    *steps, last = _steps(pre_tokenizer)
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    use_regex = last.get("use_regex", True)
    match steps:
        case []:
            return re.compile(_GPT2).findall if use_regex else whole
        case [{"type": "Digits", "individual_digits": True}] if use_regex:
            return re.compile(_GPT2_DIGITS).findall
    known = None if use_regex else PATTERNS.get(_patterns(steps))
    return re.compile(known).findall if known else None


def _steps(pre_tokenizer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if pre_tokenizer.get("type") == "Sequence":
        return pre_tokenizer.get("pretokenizers") or [{}]
    return [pre_tokenizer]


def _patterns(steps: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The patterns of steps that make each match a word, and what is between matches; empty if a step does not."""
    found = []
    for step in steps:
        way = (step.get("type"), step.get("behavior"), step.get("invert"))
        # Only with several patterns is there anything between matches.
        if way != ("Split", "Isolated", False) and (len(steps) > 1 or way != ("Split", "Removed", True)):
            return ()
        found.append(str(step["pattern"].get("Regex")))
    return tuple(found)
