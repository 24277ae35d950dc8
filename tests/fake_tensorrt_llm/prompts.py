"""How the stand-in reads prompts: ids as they are, or text whose images come by handles."""

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
    """The ids that are run, and what answers follow from: the ids, and in the place of images what they show."""

    token_ids: tuple[int, ...]
    meaning: tuple[int, ...]


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
        """As generate_async does: with handles the text counts, and the ids are made of it."""
        handles = handoff.multimodal_embedding_handles if handoff is not None else None
        if handles is None:
            token_ids = tuple(inputs["prompt_token_ids"] if isinstance(inputs, dict) else inputs)
            return Read(token_ids, token_ids)
        if self.image_token is None:
            raise ValueError("Multimodal disaggregated inference is not supported for this model")
        if not isinstance(inputs, dict) or not inputs.get("prompt"):
            raise ValueError("Text prompt is required but not provided")
        tensors = [SharedTensorContainer.from_dict(handle).get_local_view() for handle in handles]
        return self._expanded(self.tokenize(inputs["prompt"]), tensors)

    def tokenize(self, text: str) -> list[int]:
        """With whatever special tokens the tokenizer puts there itself."""
        return list(Tokenizer.from_file(str(self._path)).encode(text).ids)

    def _expanded(self, ids: Sequence[int], tensors: Sequence[Any]) -> Read:
        if list(ids).count(self.image_token) != len(tensors):
            raise ValueError("the numbers of placeholders and of embeddings differ")
        made: list[int] = []
        meaning: list[int] = []
        images = iter(tensors)
        for token in ids:
            rows = [_meaning(row) for row in next(images)] if token == self.image_token else None
            made += [token] if rows is None else [self.vocab_size + 1] * len(rows)
            meaning += [token] if rows is None else rows
        return Read(tuple(made), tuple(meaning))


def _meaning(row: Any) -> int:
    content = row.contiguous().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
