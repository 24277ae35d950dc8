"""Small tokenizers of the kinds that models have."""

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from router.text.encoding.word_patterns import PATTERNS
from router.text.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"
_WORDS = ["▁", "▁hello", "▁world", "hello", "world", "▁é", "!"]
_DOCS = Path(__file__).parents[3] / "docs"

# How byte-level tokenizers with merges split a text, by the models that have it.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "GPT-2": ByteLevel(add_prefix_space=False),
    "SmolLM": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    **{
        name: Sequence(
            [
                *(Split(Regex(pattern), "isolated") for pattern in patterns),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for name, patterns in zip(
            ("GPT-2 by pattern", "Llama 3", "Qwen 2", "Qwen 3.5", "GPT-4o", "Mistral", "DeepSeek"),
            PATTERNS,
            strict=True,
        )
    },
}

WORD_MARK, HELLO, WORLD = 258, 259, 260  # ids of the first words in `byte_fallback`


def byte_level_rust() -> RustTokenizer:
    """A tokenizer like GPT-2's, Llama 3's and Qwen's: any byte is a token, frequent words are too."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog; déjà vu, 你好 🎉"] * 20, trainer)
    return tokenizer


def trained(pre_tokenizer: PreTokenizer, vocabulary: int = 2000) -> RustTokenizer:
    """A byte-level tokenizer with merges, of the project's documentation; without added tokens."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator((page.read_text(encoding="utf-8") for page in sorted(_DOCS.glob("*.md"))), trainer)
    return tokenizer


def byte_level(config_json: str = '{"bos_token": "<s>", "eos_token": "</s>"}', template: str = "") -> Tokenizer:
    return Tokenizer(byte_level_rust().to_str().encode(), config_json, template)


def byte_fallback() -> Tokenizer:
    """One like Llama 2's: words begin with a mark for the space before them, unknown characters are byte tokens."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: index for index, token in enumerate([BOS, EOS, *byte_tokens, *_WORDS])}
    tokenizer = RustTokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return Tokenizer(tokenizer.to_str().encode(), "{}", "")


def word_pieces() -> Tokenizer:
    """One like BERT's: words are joined by spaces, `##` marks what continues one, and punctuation loses its space."""
    tokens = [BOS, EOS, "hello", "world", "##s", "##ing", "n't", ".", ",", "'", "s", "你", "##好", "[UNK]"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = RustTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return Tokenizer(tokenizer.to_str().encode(), "{}", "")


def marked_words() -> Tokenizer:
    """A tokenizer like T5's: words begin with a mark for the space before them, and there are no bytes."""
    tokens = [BOS, EOS, "▁", "▁hello", "▁world", "hello", "s", "!", "▁▁"]
    tokenizer = RustTokenizer(models.Unigram([(token, 0.0) for token in tokens]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return Tokenizer(tokenizer.to_str().encode(), "{}", "")
