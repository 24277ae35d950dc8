"""Trains the checkpoint: first the vision tower on labels, then everything on documents.

    python -m models.demo.train --device cuda --output /tmp/demo

The learning rate follows progress, which is the share of the steps, or of the minutes if those run out first.
"""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoProcessor, GenerationConfig, LlavaForConditionalGeneration, LlavaProcessor

from models.demo.architecture import BOS_ID, EOS_ID, PAD_ID, TOWER_WIDTH, model_config
from models.demo.packing import Batch, PackedDocuments, in_workers, normalized
from models.demo.progress import Every, Progress, learning_rate_factor
from models.demo.tower import LabelledPictures, LabelledScenes, PatchLabels

CHECKPOINT = Path(__file__).parent

_WEIGHT_DECAY = 0.05
_LONGEST_GRADIENT = 1.0
_REPORTS = 40
_STORED_TOWER = "vision_tower.vision_model."
_SAVES = 4


class Optimizer:
    """AdamW with clipped gradients, its learning rates following the progress."""

    def __init__(self, rates: Sequence[tuple[nn.Module, float]]) -> None:
        groups = [{"params": list(module.parameters()), "lr": rate} for module, rate in rates]
        self._rates = [rate for _, rate in rates]
        self._parameters = [parameter for module, _ in rates for parameter in module.parameters()]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=_WEIGHT_DECAY)

    def step(self, loss: torch.Tensor, share: float) -> None:
        """Takes one step down the loss's gradient."""
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * learning_rate_factor(share)
        self._adam.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, _LONGEST_GRADIENT)
        self._adam.step()


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model in training: where it is computed and saved."""

    model: LlavaForConditionalGeneration
    processor: LlavaProcessor
    output: Path
    device: torch.device
    seed: int
    workers: int

    def train_tower(self, progress: Progress, pictures: int, rate: float) -> None:
        """Teaches the tower to label patches."""
        labeller = PatchLabels(self.model.model.vision_tower, TOWER_WIDTH)
        labeller.to(self.device).train()
        optimizer = Optimizer([(labeller, rate)])
        batches = in_workers(LabelledScenes(self.seed, pictures), self.workers)
        report = Every(_REPORTS)
        for share, batch in zip(progress.shares(), batches, strict=False):
            with self._autocast():
                loss, right = _label_loss(labeller, batch, self.device)
            optimizer.step(loss, share)
            if report.is_due(share):
                _log("tower", progress, f"loss {loss.item():.4f}  whole pictures right {right.item():.3f}")

    def train_everything(self, progress: Progress, batch_tokens: int, rate: float, tower_rate: float) -> None:
        """Teaches the answers, and saves from time to time."""
        self.model.to(self.device).train()  # type: ignore[arg-type]
        inner = self.model.model
        learners = ((inner.language_model, rate), (inner.multi_modal_projector, rate), (self.model.lm_head, rate))
        optimizer = Optimizer([*learners, (inner.vision_tower, tower_rate)])
        tokenizer = self.processor.tokenizer.backend_tokenizer
        batches = in_workers(PackedDocuments(tokenizer, self.seed, batch_tokens), self.workers)
        report, save = Every(_REPORTS), Every(_SAVES)
        for share, batch in zip(progress.shares(), batches, strict=False):
            with self._autocast():
                loss = answer_loss(self.model, batch.on(self.device))
            optimizer.step(loss, share)
            if report.is_due(share):
                _log("answers", progress, f"loss {loss.item():.4f}")
            if save.is_due(share):
                self.save()
        self.save()

    def save(self) -> None:
        """Writes the checkpoint in its current state, rounded to bfloat16."""
        self.output.mkdir(parents=True, exist_ok=True)
        weights = {stored_name(name): tensor.to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}
        save_file(weights, self.output / "model.safetensors", metadata={"format": "pt"})
        self.model.config.dtype = torch.bfloat16
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.save_pretrained(self.output)
        ends = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
        )
        ends.save_pretrained(self.output)
        self.processor.save_pretrained(self.output)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


def stored_name(name: str) -> str:
    """Returns a weight's name in a LLaVA checkpoint. All versions of the library read these names; they write different
    ones.
    """
    name = name.removeprefix("model.")
    name = name.replace("vision_tower.vision_model.", "vision_tower.").replace("vision_tower.", _STORED_TOWER)
    return name.replace("language_model.", "language_model.model.").replace("lm_head.", "language_model.lm_head.")


def _label_loss(
    labeller: PatchLabels, batch: LabelledPictures, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean loss of a patch, and the share of pictures with every patch right."""
    labels = batch.labels.to(device, non_blocking=True)
    logits = labeller(batch.pixels.to(device, non_blocking=True))
    right = (logits.argmax(-1) == labels).all(-1).float().mean()
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), right


def answer_loss(model: LlavaForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Returns the mean loss of a learned token; documents in a row do not see each other."""
    same_document = batch.documents[:, :, None] == batch.documents[:, None, :]
    loss: torch.Tensor = model(
        input_ids=batch.ids,
        pixel_values=normalized(batch.pixels) if len(batch.pixels) else None,
        attention_mask=same_document.tril()[:, None],
        position_ids=batch.positions,
        labels=batch.labels,
        use_cache=False,
    ).loss
    return loss


def _log(stage: str, progress: Progress, text: str) -> None:
    print(f"{stage:8} step {progress.done_steps:6}  {progress.elapsed_seconds:6.0f} s  {text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--start-from", type=Path, help="a checkpoint to go on from; else from random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14, help="processes that make data")
    parser.add_argument("--tower-steps", type=int, default=2500)
    parser.add_argument("--tower-minutes", type=float, default=math.inf)
    parser.add_argument("--tower-pictures", type=int, default=1024, help="in a step")
    parser.add_argument("--steps", type=int, default=7500)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--batch-tokens", type=int, default=65536, help="in a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--tower-rate", type=float, default=1e-3, help="the same for the tower, learning labels")
    return parser.parse_args()


def main() -> None:
    """Trains as the arguments say."""
    arguments = _arguments()
    # Each worker process tokenizes with one thread; more threads would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    start = arguments.start_from
    trainer = Trainer(
        model=LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
        if start
        else LlavaForConditionalGeneration(model_config()),
        processor=AutoProcessor.from_pretrained(CHECKPOINT),  # type: ignore[no-untyped-call]
        output=arguments.output,
        device=torch.device(arguments.device),
        seed=arguments.seed,
        workers=arguments.workers,
    )
    if arguments.tower_steps:
        tower = Progress(arguments.tower_steps, arguments.tower_minutes * 60)
        trainer.train_tower(tower, arguments.tower_pictures, arguments.tower_rate)
    everything = Progress(arguments.steps, arguments.minutes * 60)
    trainer.train_everything(everything, arguments.batch_tokens, arguments.rate, arguments.tower_rate / 3)


if __name__ == "__main__":
    main()
