"""The ids that the simulated engine generates, its vocabulary, and the facts of its model."""

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from engine_protocol.prefix_hash import token_bytes
from services.engines.answer import FinishReason, TokenLogprob
from services.engines.base import ModelFacts, ModelFiles
from services.engines.guidance.guidance import Guidance
from services.engines.kv import KvLayout, embedding_layout
from services.engines.prompt import Sampling
from services.engines.rules import ImageRules
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.preferences import preferences_of

_EOS = "<|end|>"
IMAGE = "<image>"
_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "
_IMAGES_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}\n{% endfor %}assistant: "
)
_LETTERS = tuple(b"abcdefghijklmnopqrstuvwxyz ")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's files, and the ids that may be generated: no special ids, and not the end of sequence."""

    files: ModelFiles
    size: int
    eos_token_id: int
    ordinary: tuple[int, ...]
    image_token_id: int | None = None


def vocabulary_of(config: SimulatedConfig) -> Vocabulary:
    """Returns the configured vocabulary. Raises ConfigError if it lacks the image placeholder and images are
    configured.
    """
    if not config.model:
        return byte_vocabulary(images=config.image_tokens > 0)
    found = folder_vocabulary(Path(config.model))
    if config.image_tokens and found.image_token_id is None:
        raise ConfigError(f"engine.image_tokens: the vocabulary of {config.model} has no token {IMAGE}")
    return found


def byte_vocabulary(*, images: bool = False) -> Vocabulary:
    """Returns a vocabulary of one token a byte, whose id is the byte; then the end of sequence, and the image
    placeholder.
    """
    # Imported here, since the tokenizers library is needed only at start.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({char: byte for byte, char in enumerate(_byte_characters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (_EOS, IMAGE) if images else (_EOS,)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    config = json.dumps({"eos_token": _EOS, "clean_up_tokenization_spaces": False})
    files = ModelFiles(tokenizer.to_str().encode(), config, _IMAGES_TEMPLATE if images else _TEMPLATE)
    return Vocabulary(files, 256 + len(special), 256, _LETTERS, tokenizer.token_to_id(IMAGE))


def folder_vocabulary(folder: Path) -> Vocabulary:
    """Returns the tokenizer of a checkpoint in Hugging Face format. Raises ConfigError naming a bad file."""
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"engine.model: {folder / 'tokenizer.json'} does not exist")
    text = (folder / "tokenizer.json").read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except ValueError as error:
        raise ConfigError(f"engine.model: {folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    size = tokenizer.get_vocab_size()
    config = _text_or(folder / "tokenizer_config.json", "{}")
    files = ModelFiles(text, config, _chat_template(folder, config))
    eos = _eos_token_id(json.loads(config), tokenizer.get_vocab(), size - 1)
    ordinary = tuple(id for id in range(size) if id not in special and id != eos)
    return Vocabulary(files, size, eos, ordinary, tokenizer.token_to_id(IMAGE))


def _text_or(path: Path, otherwise: str) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else otherwise


def _chat_template(folder: Path, config: str) -> str:
    template = json.loads(config).get("chat_template", "")
    return _text_or(folder / "chat_template.jinja", template if isinstance(template, str) else "")


def _eos_token_id(config: dict[str, object], vocabulary: dict[str, int], otherwise: int) -> int:
    token = config.get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    return vocabulary.get(str(name), otherwise)


def _byte_characters() -> list[str]:
    """Returns the printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class TokenStream:
    """The ids of a request. Each is a function of all ids before it and of the sampling, and of nothing else.

    So a request that another worker continues from the ids so far yields the same ids as one that was never
    interrupted. Raises InvalidRequest if the sampling could ban every id.

    All ids that a grammar allows are equally likely, whatever biases and penalties there are. Banned ones come where it
    allows no others.
    """

    def __init__(
        self, vocabulary: Vocabulary, sampling: Sampling, end_probability: float, emitted: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._end_below = int(end_probability * 2**32)
        self._preferences = preferences_of(vocabulary.ordinary, vocabulary.eos_token_id, sampling, emitted)
        seed = sampling.seed if sampling.temperature > 0 and sampling.seed is not None else 0
        self.guidance: Guidance | None = None  # of a guided answer; set before the first id
        self._hash = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8)

    def see(self, media: bytes) -> None:
        """Makes the ids depend on the media of the prompt."""
        self._hash.update(media)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends ids to the context."""
        self._hash.update(token_bytes(token_ids) if len(token_ids) > 1 else array("I", token_ids).tobytes())

    def generate(self) -> int:
        """Chooses the next id, and appends it."""
        token_id = self._next()
        self.extend((token_id,))
        if self._preferences is not None:
            self._preferences.append(token_id)
        if self.guidance is not None:
            self.guidance.append(token_id)
        return token_id

    def _next(self) -> int:
        value = int.from_bytes(self._hash.digest(), "little")
        eos, preferences = self._vocabulary.eos_token_id, self._preferences
        if self.guidance is not None:
            allowed = self.guidance.allowed_ids()
            banned = preferences.banned() if preferences is not None else set()
            possible = [token_id for token_id in allowed if token_id not in banned] or allowed
            return possible[(value >> 32) % len(possible)]
        if value & 0xFFFFFFFF < self._end_below and (preferences is None or eos not in preferences.banned()):
            return eos
        ordinary = self._vocabulary.ordinary
        return ordinary[(value >> 32) % len(ordinary)] if preferences is None else preferences.choose(value >> 32)


def finish_reason(
    token_id: int, generated: int, left: int, eos_token_id: int, sampling: Sampling
) -> FinishReason | None:
    """The reason why the id just generated, the `generated`th, ends the request; the context has `left` tokens left."""
    if token_id == eos_token_id and sampling.guide is not None:
        # The grammar allows it only where an answer may end, whatever min_tokens and ignore_eos say.
        return FinishReason.END_OF_SEQUENCE
    if generated >= sampling.min_tokens:
        if token_id == eos_token_id and not sampling.ignore_eos:
            return FinishReason.END_OF_SEQUENCE
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP_TOKEN
    if generated >= sampling.max_tokens or left <= 0:
        return FinishReason.LENGTH
    return None


def logprob(token_id: int, rivals: int, vocabulary: Vocabulary) -> TokenLogprob:
    """Returns made-up log probabilities: one half for the token, and halves of halves for the others."""
    others = (other for other in vocabulary.ordinary if other != token_id)
    ranked = [token_id, *(next(others) for _ in range(rivals - 1))][:rivals]
    return TokenLogprob(token_id, -0.6931472, tuple((id, -0.6931472 * (rank + 1)) for rank, id in enumerate(ranked)))


def kv_layout(config: SimulatedConfig, vocabulary: Vocabulary) -> KvLayout:
    """Returns the layout of the KV pool."""
    fingerprint = hashlib.sha256(vocabulary.files.tokenizer_json).hexdigest()[:16]
    return KvLayout(
        model=f"simulated:{config.name}:{fingerprint}",
        dtype="uint8",
        num_layers=1,
        kv_factor=1,
        kv_heads=1,
        block_tokens=config.block_tokens,
        head_dim=config.block_bytes // config.block_tokens,
        block_bytes=config.block_bytes,
    )


def model_facts(config: SimulatedConfig, vocabulary: Vocabulary, layout: KvLayout, load_seconds: float) -> ModelFacts:
    """Returns the facts. `layout` is that of the caller's pool: of KV, or of embeddings."""
    return ModelFacts(
        name=config.name,
        engine="simulated",
        max_context_tokens=config.context_tokens,
        vocab_size=vocabulary.size,
        max_logprobs=20,
        eos_token_ids=(vocabulary.eos_token_id,),
        layout=layout,
        files=vocabulary.files,
        load_seconds=load_seconds,
        images=_image_rules(config, vocabulary),
        guided_decoding=config.guided_decoding,
        settings=(("kv_blocks", str(config.num_blocks)), ("max_sequences", str(config.max_batch))),
        data_parallel_ranks=config.data_parallel_ranks,
    )


def _image_rules(config: SimulatedConfig, vocabulary: Vocabulary) -> ImageRules | None:
    if not config.image_tokens or vocabulary.image_token_id is None:
        return None
    size = config.image_hidden_size
    layout = embedding_layout(kv_layout(config, vocabulary).model, "float32", size)
    return ImageRules(IMAGE, vocabulary.image_token_id, config.image_tokens, size, layout)
