"""Packs documents into rows of tokens, in worker processes during training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from models.demo.architecture import PAD_ID
from models.demo.exercises.exercise import IMAGE
from models.demo.exercises.generate_data import Document, documents
from models.demo.exercises.scenes import CELL, SIDE, Scene, draw
from models.demo.tokenizing import CONTEXT_TOKENS

NOT_LEARNED = -100
PATCHES = (SIDE // CELL) ** 2
SHORT_ROW_TOKENS = 512

_DOCUMENTS_AT_ONCE = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed documents.

    `ids`, `labels`, `documents` and `positions` are `[rows, row tokens]`; `documents` numbers the documents of a row
    from 0, and `positions` counts the tokens of each document from 0. `pixels` is `[pictures, 3, SIDE, SIDE]`, bytes,
    in reading order.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor
    pixels: torch.Tensor

    def on(self, device: torch.device) -> "Batch":
        """Returns the same batch in a device's memory."""
        tensors = (self.ids, self.labels, self.documents, self.positions, self.pixels)
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


def pixels_of(scenes: Sequence[Scene]) -> torch.Tensor:
    """Returns the scenes' pictures as bytes, `[scenes, 3, SIDE, SIDE]`."""
    pictures = [np.asarray(draw(scene)) for scene in scenes]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) if pictures else torch.zeros(0, 3, SIDE, SIDE)


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    """Scales bytes as the image processor does: from -1 to 1."""
    return pixels.float() / 127.5 - 1


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Returns a document's tokens with their labels, and its scenes."""

    ids: list[int]
    labels: list[int]
    scenes: tuple[Scene, ...]


@dataclass(slots=True)
class _Rows:
    """Fills rows of one length until a batch of them is full."""

    row_tokens: int
    batch_tokens: int
    rows: list[list[_Tokens]] = field(default_factory=lambda: [[]])

    def add(self, document: _Tokens) -> Batch | None:
        """Adds a document; returns the full batch if the document no longer fits into it."""
        if sum(len(other.ids) for other in self.rows[-1]) + len(document.ids) <= self.row_tokens:
            self.rows[-1].append(document)
            return None
        full = len(self.rows) * self.row_tokens >= self.batch_tokens
        batch = _batch_of(self.rows, self.row_tokens) if full else None
        self.rows = [[document]] if full else [*self.rows, [document]]
        return batch


def _batch_of(rows: list[list[_Tokens]], row_tokens: int) -> Batch:
    ids, labels, numbers, positions = np.empty((4, len(rows), row_tokens), dtype=np.int64)
    for row, packed in enumerate(rows):
        used = sum(len(document.ids) for document in packed)
        padding = _Tokens([PAD_ID] * (row_tokens - used), [NOT_LEARNED] * (row_tokens - used), ())
        everything = [*packed, padding]
        ids[row] = np.concatenate([document.ids for document in everything])
        labels[row] = np.concatenate([document.labels for document in everything])
        numbers[row] = np.repeat(np.arange(len(everything)), [len(document.ids) for document in everything])
        positions[row] = np.concatenate([np.arange(len(document.ids)) for document in everything])
    scenes = [scene for packed in rows for document in packed for scene in document.scenes]
    return Batch(
        ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        documents=torch.from_numpy(numbers),
        positions=torch.from_numpy(positions),
        pixels=pixels_of(scenes),
    )


class PackedDocuments(IterableDataset[Batch]):
    """Yields batches without end. Each worker process generates documents from its own seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int, batch_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._batch_tokens = batch_tokens

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        stream = documents(f"{self._seed}/{worker.id if worker else 0}")
        short = _Rows(SHORT_ROW_TOKENS, self._batch_tokens)
        long = _Rows(CONTEXT_TOKENS, self._batch_tokens)
        while True:
            for document in self._tokenized(list(islice(stream, _DOCUMENTS_AT_ONCE))):
                if len(document.ids) <= CONTEXT_TOKENS:
                    batch = (short if len(document.ids) <= SHORT_ROW_TOKENS else long).add(document)
                    if batch is not None:
                        yield batch

    def _tokenized(self, drawn: Sequence[Document]) -> Iterator[_Tokens]:
        texts = [segment.text.replace(IMAGE, IMAGE * PATCHES) for document in drawn for segment in document.segments]
        encodings = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        for document in drawn:
            ids: list[int] = []
            labels: list[int] = []
            for segment in document.segments:
                segment_ids = next(encodings).ids
                ids += segment_ids
                labels += segment_ids if segment.learned else [NOT_LEARNED] * len(segment_ids)
            yield _Tokens(ids, labels, document.scenes)


def in_workers(dataset: IterableDataset[T], workers: int) -> Iterator[T]:
    """Yields the dataset's items, made by `workers` processes, or by this process if 0."""
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available()))
