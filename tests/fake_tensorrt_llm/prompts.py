"""The stand-in's prompts: ids as they are, or text whose images come by handles."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from fake_tensorrt_llm.shared_tensor import SharedTensorContainer


@dataclass(frozen=True, slots=True)
class Read:
    """The ids that are run. Those of images are outside the vocabulary; handles are opened when it is their turn."""

    token_ids: tuple[int, ...]
    handles: tuple[dict[str, Any], ...] = ()
    hashes: tuple[tuple[int, ...], ...] = ()


class PromptReader:
    """Reads prompts of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        text = {**config, **config.get("text_config", {})}
        self.vocab_size = int(text["vocab_size"])
        self.hidden_size = int(text["hidden_size"])
        self.image_token = config.get("image_token_id", config.get("image_token_index"))
        self._path = folder / "tokenizer.json"

    def read(self, inputs: Any, handoff: Any) -> Read:
        """The ids as generate_async makes them: with handles the text counts, and the ids are made of it."""
        handles = handoff.multimodal_embedding_handles if handoff is not None else None
        if handles is None:
            return Read(tuple(inputs["prompt_token_ids"] if isinstance(inputs, dict) else inputs))
        if self.image_token is None:
            raise ValueError("Multimodal disaggregated inference is not supported for this model")
        if not isinstance(inputs, dict) or not inputs.get("prompt"):
            raise ValueError("Text prompt is required but not provided")
        ids = self._expanded(self.tokenize(inputs["prompt"]), [handle["tensor_size"][0] for handle in handles])
        return Read(ids, tuple(handles), tuple(map(tuple, handoff.multimodal_hashes)))

    def opened(self, read: Read) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids of answers and of blocks: with what images show, and their hashes, in the images' place."""
        shown = [row for handle in read.handles for row in _rows(handle)]
        named = [
            _number(repr((eight, row)).encode())
            for eight, handle in zip(read.hashes, read.handles, strict=True)
            for row in range(handle["tensor_size"][0])
        ]
        return self._filled(read, shown), self._filled(read, named)

    def tokenize(self, text: str) -> list[int]:
        """With whatever special tokens the tokenizer puts there itself."""
        return list(Tokenizer.from_file(str(self._path)).encode(text).ids)

    def _expanded(self, ids: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
        if list(ids).count(self.image_token) != len(rows):
            raise ValueError("the numbers of placeholders and of embeddings differ")
        made: list[int] = []
        counts = iter(rows)
        for token in ids:
            made += [self.vocab_size + 1] * next(counts) if token == self.image_token else [token]
        return tuple(made)

    def _filled(self, read: Read, rows: Sequence[int]) -> tuple[int, ...]:
        following = iter(rows)
        return tuple(next(following) if token == self.vocab_size + 1 else token for token in read.token_ids)


def _rows(handle: dict[str, Any]) -> list[int]:
    tensor = SharedTensorContainer.from_dict(handle).get_local_view()
    return [_number(row.contiguous().view(torch.uint8).numpy().tobytes()) for row in tensor]


def _number(content: bytes) -> int:
    return 2**32 + int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
