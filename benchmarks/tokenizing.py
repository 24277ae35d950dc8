"""The cost of tokenizing a prompt, by the `tokenizers` library and by the router: `python -m benchmarks.tokenizing`.

The tokenizers are one of bytes, as the simulated engine's, and byte-level BPE with the patterns of well-known models,
trained on half of the project's documentation. Prompts are pieces of the other half, each another one; before, the
router has tokenized the first half. `chat` is a conversation of 20 turns of which the last is new; `chat, new` one of
which the router knows nothing. `letters` are random, and have no words that are worth remembering. Printed is CPU time
of this process: the median of rounds, which go from one to the other.
"""

import argparse
import json
import os
import random
import statistics
import string
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from router.text.encoding.encoder import Encoder, library_ids
from router.text.encoding.word_patterns import PATTERNS
from services.engines.simulated.tokens import byte_vocabulary

DOCS = Path(__file__).resolve().parent.parent / "docs"
START, END = "<|im_start|>", "<|im_end|>"
# Of PATTERNS. Not GPT-2's, which is measured as ByteLevel has it, and not Qwen 3.5's, which is Qwen 2's in ASCII text.
NAMES = ("", "Llama 3", "Qwen 2", "", "GPT-4o", "Mistral", "DeepSeek V3")
VOCABULARY = 16_000
TURNS = 20
TURN_CHARACTERS = 400


def tokenizers(corpus: Sequence[str]) -> dict[str, Tokenizer]:
    """By name."""
    kinds: dict[str, PreTokenizer] = {
        "GPT-2": ByteLevel(add_prefix_space=False),
        "SmolLM": Steps([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    }
    for name, patterns in zip(NAMES, PATTERNS, strict=True):
        splits = [Split(Regex(pattern), "isolated") for pattern in patterns]
        if name:
            kinds[name] = Steps([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    found = {"bytes": Tokenizer.from_buffer(byte_vocabulary().files.tokenizer_json)}
    return found | {name: _trained(kind, corpus) for name, kind in kinds.items()}


def _trained(kind: PreTokenizer, corpus: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = kind
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (START, END)])
    return Tokenizer.from_str(tokenizer.to_str())


class Prompts:
    """Prompts, each another one, from ASCII text."""

    def __init__(self, text: str, seed: int) -> None:
        self._text = text
        self._chance = random.Random(seed)

    def piece(self, length: int) -> str:
        """A piece of the text that begins with a line."""
        start = self._text.rfind("\n", 0, self._chance.randrange(1, len(self._text) - length)) + 1
        return self._text[start : start + length]

    def tokens(self, count: int, tokenizer: Tokenizer) -> str:
        """A piece of so many tokens or one or two more."""
        text = self.piece(5 * count)
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return text[: encoding.offsets[count - 1][1]] if len(encoding.ids) > count else text

    def letters(self, length: int) -> str:
        """Random letters, as words of six."""
        return " ".join("".join(self._chance.choices(string.ascii_letters, k=6)) for _ in range(length // 7))

    def turn(self, role: str) -> str:
        """A turn of a conversation."""
        return f"{START}{role}\n{self.piece(TURN_CHARACTERS)}{END}\n"

    def turns(self, count: int) -> str:
        """A conversation."""
        return "".join(self.turn(("user", "assistant")[number % 2]) for number in range(count))


def measure(tokenizer: Tokenizer, warm: str, fresh: str, each: int, rounds: int) -> dict[str, tuple[float, float]]:
    """The microseconds of each kind of prompt, by the library and by the router."""
    encoder = Encoder(tokenizer)
    for start in range(0, len(warm), 2000):
        encoder.encode(warm[start : start + 2000], add_special_tokens=False)
    prompts = Prompts(fresh, seed=0)
    known = [prompts.turns(TURNS - 1) for _ in range(4)]
    for chat in known:
        encoder.encode(chat, add_special_tokens=False)
    kinds: dict[str, Callable[[], str]] = {
        "512 bytes": lambda: prompts.piece(512),
        "512 tokens": lambda: prompts.tokens(512, tokenizer),
        "chat": lambda: random.choice(known) + prompts.turn("user"),
        "chat, new": lambda: prompts.turns(TURNS),
        "512 bytes, accents": lambda: prompts.piece(510) + "\u00e9",
        "512 bytes, letters": lambda: prompts.letters(512),
    }
    return {name: _compare(tokenizer, encoder, make, each, rounds) for name, make in kinds.items()}


def _compare(
    tokenizer: Tokenizer, encoder: Encoder, make: Callable[[], str], each: int, rounds: int
) -> tuple[float, float]:
    library, router = [], []
    for _ in range(rounds):
        texts = [make() for _ in range(each)]
        library.append(_microseconds(lambda text: library_ids(tokenizer, text, False), texts))
        router.append(_microseconds(lambda text: encoder.encode(text, add_special_tokens=False), texts))
        assert library_ids(tokenizer, texts[0], False) == encoder.encode(texts[0], add_special_tokens=False)
    return statistics.median(library), statistics.median(router)


def _microseconds(encode: Callable[[str], object], texts: Sequence[str]) -> float:
    started = time.process_time_ns()
    for text in texts:
        encode(text)
    return (time.process_time_ns() - started) / 1000 / len(texts)


def pages() -> tuple[str, str]:
    """The two halves of the documentation, of their ASCII lines."""
    texts = [page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))]
    lines = ["\n".join(line for line in text.splitlines() if line.isascii()) for text in texts]
    return "\n".join(lines[::2]), "\n".join(lines[1::2])


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=40, help="prompts of a kind in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    first, second = pages()
    found = {
        name: measure(tokenizer, first, second, arguments.each, arguments.rounds)
        for name, tokenizer in tokenizers([first]).items()
    }
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"Load average: {os.getloadavg()[0]:.1f}\n")
    print("| tokenizer | prompt | library, us | router, us | ratio |\n|---|---|---|---|---|")
    for name, kinds in found.items():
        for prompt, (library, router) in kinds.items():
            print(f"| {name} | {prompt} | {library:.0f} | {router:.0f} | {router / library:.2f} |")


if __name__ == "__main__":
    main()
