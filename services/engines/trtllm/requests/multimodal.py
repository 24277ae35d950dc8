"""A prompt with images, as TensorRT-LLM takes it: text, with a handle on each embedding.

For vision-language models it tokenizes text itself, and ignores ids. So it only gets a text that becomes exactly these
ids, and its ids are compared afterwards.
"""

import struct
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from baton.errors import EngineFailed, Unsupported
from services.engines.prompt import Embedding, MediaSpan, Prompt
from services.engines.trtllm.package import Package

_DIGEST = struct.Struct("<8i")


@dataclass(frozen=True, slots=True)
class TrtllmPrompt:
    """The parts of a request with images. Handles do not own memory: keep `tensors` until the engine has read them."""

    inputs: dict[str, Any]
    handles: list[dict[str, Any]] = field(repr=False)
    hashes: list[list[int]]
    runs: list[list[tuple[int, int, list[int]]]]
    tensors: tuple[Any, ...] = field(repr=False)

    def fields(self, known: Container[str]) -> dict[str, Any]:
        """Fields of DisaggregatedParams for the embeddings. Without the hashes, blocks of images are never found in the
        cache.
        """
        fields = {"multimodal_embedding_handles": self.handles, "multimodal_hashes": self.hashes}
        # Some versions refuse hashes without runs.
        return {**fields, "multimodal_item_runs": self.runs} if "multimodal_item_runs" in known else fields


class TrtllmProcessor:
    """Converts prompts with images into the engine's inputs. Blocks: it copies embeddings and tokenizes."""

    def __init__(self, package: Package, folder: Path) -> None:
        self._package = package
        self._path = folder / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None

    def process(self, prompt: Prompt) -> TrtllmPrompt:
        """Raises Unsupported if no text becomes these ids. A handle has one reader, so each call makes new ones."""
        text = self._text(collapsed(prompt))
        tensors = tuple(_tensor(span.embedding) for span in prompt.media if span.embedding is not None)
        container = self._package.shared_tensor()
        return TrtllmPrompt(
            inputs={"prompt": text},
            handles=[container.from_tensor(tensor).dump_to_dict() for tensor in tensors],
            hashes=[hash_of(span.digest) for span in prompt.media],
            # Every token of a span has a row of the embedding.
            runs=[[(span.start, span.num_tokens, [])] for span in prompt.media],
            tensors=tensors,
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self._path))
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        first = self._tokenizer.id_to_token(token_ids[0]) or ""
        # The tokenizer may add the first special token itself.
        for candidate in (text, text.removeprefix(first)):
            if self._tokenizer.encode(candidate).ids == list(token_ids):
                return candidate
        raise Unsupported("prompt: with images TensorRT-LLM takes text, and no text becomes these token ids")


def collapsed(prompt: Prompt) -> tuple[int, ...]:
    """Returns the context with one placeholder for each image, as in the text."""
    ids: list[int] = []
    start = 0
    for span in prompt.media:
        ids += prompt.context[start : span.start + 1]
        start = span.end
    return (*ids, *prompt.context[start:])


def check_ids(prompt: Prompt, made: Sequence[int]) -> None:
    """Raises EngineFailed if the engine made other ids of the text than the prompt's, placeholders aside."""
    if _text_ids(prompt.context, prompt.media) != _text_ids(made, prompt.media):
        raise EngineFailed(f"TensorRT-LLM has made {len(made)} other tokens of the prompt than its {prompt.num_tokens}")


def hash_of(digest: bytes) -> list[int]:
    """Returns the eight integers by which TensorRT-LLM identifies an image, made of its digest."""
    return list(_DIGEST.unpack(digest[: _DIGEST.size].ljust(_DIGEST.size, b"\0")))


def _text_ids(token_ids: Sequence[int], media: Sequence[MediaSpan]) -> list[int]:
    """Returns the ids with placeholders as -1, since the engine may use other ids for them."""
    ids = list(token_ids)
    for span in media:
        ids[span.start : span.end] = [-1] * (min(span.end, len(ids)) - min(span.start, len(ids)))
    return ids


def _tensor(embedding: Embedding) -> Any:
    import torch

    # Copied, because torch needs writable memory.
    flat = torch.frombuffer(bytearray(embedding.data), dtype=getattr(torch, embedding.dtype))
    return flat.reshape(embedding.shape)
