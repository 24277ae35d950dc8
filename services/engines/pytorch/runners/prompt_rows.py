"""The rows of a step whose logits are reported as log probabilities of prompts; most steps have none."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.engines.pytorch.runners.batch import Chunk
from services.engines.pytorch.sampling.prompt_logprobs import PromptReport


@dataclass(frozen=True, slots=True)
class _Part:
    report: PromptReport
    position: int
    row: int
    count: int


class PromptRows:
    """The rows of `chunks`, in the order of their tokens. The model computes them after the rows to sample from."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._parts: list[_Part] = []
        row = 0
        for chunk in chunks:
            report = chunk.sequence.prompt_report
            if report is not None and (count := report.count(chunk.start, chunk.end)):
                self._parts.append(_Part(report, chunk.start, row, count))
            row += chunk.count

    def after(self, sampled: torch.Tensor) -> torch.Tensor:
        """Returns the rows to compute: those to sample from, and these."""
        if not self._parts:
            return sampled
        rows = np.concatenate([np.arange(part.row, part.row + part.count) for part in self._parts])
        return torch.cat([sampled, torch.from_numpy(rows).to(sampled.device, sampled.dtype)])

    def report(self, logits: torch.Tensor, sampled: int) -> torch.Tensor:
        """Reports the logits of these rows, and returns those of the first `sampled` rows."""
        first = sampled
        for part in self._parts:
            part.report.add(part.position, logits[first : first + part.count])
            first += part.count
        return logits[:sampled]
