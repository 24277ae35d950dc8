"""One step: the chunks through the model, and a token for each sequence that has come to its end."""

from collections.abc import Sequence

import torch

from services.engines.pytorch.batch import BatchBuilder, Chunk, KvCache, StepInput
from services.engines.pytorch.model import LoadedModel
from services.engines.pytorch.sampling import Chosen, sample


class Runner:
    """Owns the model. Must be used by one thread, under `torch.inference_mode`."""

    def __init__(self, model: LoadedModel, cache: KvCache) -> None:
        self._module = model.module
        self._builder = BatchBuilder(cache, model.shape.query_heads, model.dtype)

    def run(self, chunks: Sequence[Chunk]) -> list[tuple[Chunk, Chosen | None]]:
        """Computes the chunks' KV into their blocks; with each chunk the token that was sampled after it, if any."""
        step = self._builder.build(chunks)
        output = self._module(
            **self._tokens(step),
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=step.last_rows,
            paged_batch=step.paged,
        )
        sampling = [chunk for chunk in step.chunks if chunk.samples]
        chosen = self._sample(output.logits[0], sampling) if sampling else []
        results = iter(chosen)
        return [(chunk, next(results) if chunk.samples else None) for chunk in step.chunks]

    def _tokens(self, step: StepInput) -> dict[str, torch.Tensor]:
        """What the model reads: ids, or, where media are among them, the embeddings of ids and media."""
        if not step.media:
            return {"input_ids": step.token_ids}
        read: torch.Tensor = self._module.get_input_embeddings()(step.token_ids)
        for part in step.media:
            read[0, part.start : part.start + len(part.rows)] = part.rows.to(read.device, read.dtype)
        return {"inputs_embeds": read}

    def _sample(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[Chosen]:
        return sample(logits.float(), [chunk.sequence.sampler for chunk in chunks])
