"""A prompt with images, as TensorRT-LLM takes one: as text, with a handle on each embedding.

For vision-language models it makes the ids anew from text, and ids that it was given count for nothing. So only a text
is given to it that becomes these very ids, and what it made of it is compared.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rpc.errors import EngineFailed, Unsupported
from services.engines.trtllm.package import Package
from services.prompt import Embedding, MediaSpan, Prompt

_DIGEST = struct.Struct("<8i")


@dataclass(frozen=True, slots=True)
class Illustration:
    """What a request with images is made of. `tensors` must live until the engine has read them: handles do not own."""

    inputs: dict[str, Any]
    handles: list[dict[str, Any]] = field(repr=False)
    hashes: list[list[int]]
    tensors: tuple[Any, ...] = field(repr=False)

    @property
    def fields(self) -> dict[str, Any]:
        """For DisaggregatedParams. Without the hashes blocks of images would never be found again."""
        return {"multimodal_embedding_handles": self.handles, "multimodal_hashes": self.hashes}


class Illustrator:
    """Makes prompts with images into what the engine takes. Blocking: it copies embeddings and tokenizes."""

    def __init__(self, package: Package, folder: Path) -> None:
        self._package = package
        self._path = folder / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None

    def illustrate(self, prompt: Prompt) -> Illustration:
        """Raises Unsupported if no text becomes these ids. A handle is good for one reader: each time they are new."""
        text = self._text(collapsed(prompt))
        tensors = tuple(_tensor(span.embedding) for span in prompt.media if span.embedding is not None)
        container = self._package.shared_tensor()
        return Illustration(
            inputs={"prompt": text},
            handles=[container.from_tensor(tensor).dump_to_dict() for tensor in tensors],
            hashes=[hash_of(span.digest) for span in prompt.media],
            tensors=tensors,
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self._path))
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        first = self._tokenizer.id_to_token(token_ids[0]) or ""
        # The tokenizer may put the first special token there itself.
        for candidate in (text, text.removeprefix(first)):
            if self._tokenizer.encode(candidate).ids == list(token_ids):
                return candidate
        raise Unsupported("prompt: with images TensorRT-LLM takes text, and no text becomes these token ids")


def collapsed(prompt: Prompt) -> tuple[int, ...]:
    """The context with one placeholder for each image, as it stood in the text."""
    ids: list[int] = []
    start = 0
    for span in prompt.media:
        ids += prompt.context[start : span.start + 1]
        start = span.end
    return (*ids, *prompt.context[start:])


def check_ids(prompt: Prompt, made: Sequence[int]) -> None:
    """Raises EngineFailed if the engine has not made the prompt's ids of its text, placeholders aside."""
    if _text_ids(prompt.context, prompt.media) != _text_ids(made, prompt.media):
        raise EngineFailed(
            f"TensorRT-LLM has made {len(made)} other tokens of the prompt than its {len(prompt.context)}"
        )


def hash_of(digest: bytes) -> list[int]:
    """The eight integers by which TensorRT-LLM tells images apart: of equal digests they are equal."""
    return list(_DIGEST.unpack(digest[: _DIGEST.size].ljust(_DIGEST.size, b"\0")))


def _text_ids(token_ids: Sequence[int], media: Sequence[MediaSpan]) -> list[int]:
    """Ids of placeholders may be outside the vocabulary: only how many there are counts."""
    ids = list(token_ids)
    for span in media:
        ids[span.start : span.end] = [-1] * (min(span.end, len(ids)) - min(span.start, len(ids)))
    return ids


def _tensor(embedding: Embedding) -> Any:
    import torch

    # Copied, for the bytes are not ours to be written to.
    flat = torch.frombuffer(bytearray(embedding.data), dtype=getattr(torch, embedding.dtype))
    return flat.reshape(embedding.shape)
