"""One step: runs the chunks through the model, and samples a token for each sequence that is complete."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from services.engines.guidance.compiler import MaskThreads
from services.engines.guidance.guidance import Guidance
from services.engines.pytorch.lora.layers import LoraLayers
from services.engines.pytorch.model.loading import LoadedModel
from services.engines.pytorch.runners.batch import BatchBuilder, Chunk, KvCache, StepInput
from services.engines.pytorch.runners.step_tensors import PromptRows
from services.engines.pytorch.sampling.sampling import Chosen, sample
from services.engines.pytorch.speculation.drafting import confirmed, sampled_positions


@dataclass(frozen=True, slots=True)
class InflightStep:
    """A step that was started. `outcomes` waits for it, and returns each chunk with the token sampled after it, if any.

    If it `may_be_followed`, the next step may start before `outcomes` is called.
    """

    chunks: Sequence[Chunk]
    outcomes: Callable[[], list[Chosen | None]]
    may_be_followed: bool


class StepRunner(Protocol):
    """Computes steps. Used by one thread, under `torch.inference_mode`."""

    def start(self, chunks: Sequence[Chunk]) -> InflightStep:
        """Starts to compute the chunks' KV into their blocks. Later steps see that KV."""

    def prepare_more(self) -> bool:
        """Prepares later steps, for a short time, while none is in flight. False if nothing is left to prepare."""


class LibraryRunner:
    """Steps by transformers' own modules, for every supported model and device."""

    def __init__(self, model: LoadedModel, cache: KvCache, lora: LoraLayers | None = None) -> None:
        self.module: Any = model.module
        self._lora = lora
        self._builder = BatchBuilder(cache, model.shape.query_heads, model.dtype)
        self._masks = MaskThreads()

    def start(self, chunks: Sequence[Chunk]) -> InflightStep:
        """Computes the step before it returns. See StepRunner."""
        self._masks.begin(guided(chunks))
        step = self._builder.build(chunks)
        if self._lora is not None:
            self._lora.choose([(chunk.sequence.lora_slot, chunk.count) for chunk in step.chunks])
        reported = PromptRows(step.chunks)
        output = self.module(
            **self._tokens(step),
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=reported.after(step.last_rows),
            paged_batch=step.paged,
        )
        sampling = [chunk for chunk in step.chunks if chunk.samples]
        states = sampled_positions(sampling)
        logits = reported.report(output.logits[0], len(states))
        chosen = iter(sample(logits.float(), states) if sampling else [])
        outcomes = [confirmed(chunk, chosen) if chunk.samples else None for chunk in step.chunks]
        return InflightStep(step.chunks, partial(_completed, outcomes, logits), may_be_followed=False)

    def prepare_more(self) -> bool:
        """False. See StepRunner."""
        return False

    def _tokens(self, step: StepInput) -> dict[str, torch.Tensor]:
        """Returns the model's input: ids or, with media, the embeddings of ids and media."""
        if not step.media:
            return {"input_ids": step.token_ids}
        read: torch.Tensor = self.module.get_input_embeddings()(step.token_ids)
        for part in step.media:
            read[0, part.start : part.start + len(part.rows)] = part.rows.to(read.device, read.dtype)
        return {"inputs_embeds": read}


def _completed(outcomes: list[Chosen | None], logits: torch.Tensor) -> list[Chosen | None]:
    """Waits for a step on a device, if no sampled token has done so: its KV may be told of afterwards."""
    if logits.device.type == "cuda" and not any(outcomes):
        torch.cuda.current_stream(logits.device).synchronize()
    return outcomes


def guided(chunks: Sequence[Chunk]) -> list[Guidance]:
    """Returns the guidance of the sequences that get a token in a step of these chunks."""
    found = (chunk.sequence.sampler.guidance for chunk in chunks if chunk.samples)
    return [guidance for guidance in found if guidance is not None]
