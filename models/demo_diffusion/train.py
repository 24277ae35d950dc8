"""Trains the checkpoint: first the autoencoder, then the text encoder and the network that removes noise.

    python -m models.demo_diffusion.train --device cuda --output /tmp/demo_diffusion

The network learns a rectified flow: from x = (1 - t) latent + t noise, it predicts noise - latent.
"""

import argparse
import copy
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from torch import nn
from torch.nn import functional

from models.demo.progress import Every, Progress
from models.demo.train import Optimizer
from models.demo_diffusion import architecture
from models.demo_diffusion.drawings import Drawings, RandomDrawings, in_workers

_REPORTS = 30
_DIVERGENCE_WEIGHT = 1e-6
_AVERAGED = 0.999  # of the weights that are saved, from step to step
_SCALE_PICTURES = 4096


class Trainer:
    """A pipeline in training."""

    def __init__(self, device: torch.device, rate: float) -> None:
        self.device = device
        self.rate = rate
        self.tokenizer = architecture.new_tokenizer()
        self.autoencoder = architecture.new_autoencoder().to(device)
        self.unet = architecture.new_unet().to(device)
        self.text_encoder = architecture.new_text_encoder().to(device)

    def train_autoencoder(self, progress: Progress, batches: Iterator[Drawings]) -> None:
        """Teaches it to write a picture as latents and to read it back, and measures the latents' scale."""
        optimizer, report = Optimizer([(self.autoencoder, self.rate)]), Every(_REPORTS)
        for share, batch in zip(progress.shares(), batches, strict=False):
            pixels = self._pixels(batch)
            with self._autocast():
                latents = self.autoencoder.encode(pixels).latent_dist
                again = self.autoencoder.decode(latents.sample()).sample
            difference = (again.float() - pixels).abs().mean() + (again.float() - pixels).square().mean()
            loss = difference + _DIVERGENCE_WEIGHT * latents.kl().mean()
            optimizer.step(loss, share)
            if report.is_due(share):
                _log("pictures", progress, f"difference {difference.item():.4f}")
        self._measure_scale(batches)

    @torch.no_grad()
    def _measure_scale(self, batches: Iterator[Drawings]) -> None:
        latents: list[torch.Tensor] = []
        while sum(map(len, latents)) < _SCALE_PICTURES:
            latents.append(self.autoencoder.encode(self._pixels(next(batches))).latent_dist.mode())
        whole = torch.cat(latents)
        self.autoencoder.register_to_config(scaling_factor=round(1 / whole.std().item(), 4), shift_factor=None)

    def train_unet(self, progress: Progress, batches: Iterator[Drawings], output: Path) -> None:
        """Teaches the flow from noise to pictures, given their prompts, and saves the averaged weights."""
        learner = nn.ModuleDict({"unet": self.unet, "text_encoder": self.text_encoder})
        averaged = copy.deepcopy(learner)
        optimizer, report = Optimizer([(learner, self.rate)]), Every(_REPORTS)
        for share, batch in zip(progress.shares(), batches, strict=False):
            with self._autocast():
                loss = self._flow_loss(batch)
            optimizer.step(loss, share)
            keep = min(_AVERAGED, progress.done_steps / (progress.done_steps + 10))
            with torch.no_grad():
                torch._foreach_lerp_(list(averaged.parameters()), list(learner.parameters()), 1 - keep)
            if report.is_due(share):
                _log("flow", progress, f"loss {loss.item():.4f}")
        self.unet, self.text_encoder = averaged["unet"], averaged["text_encoder"]
        self.save(output)

    def _flow_loss(self, batch: Drawings) -> torch.Tensor:
        with torch.no_grad():
            latents = self.autoencoder.encode(self._pixels(batch)).latent_dist.mode().float()
        latents = latents * self.autoencoder.config.scaling_factor
        noise, times = torch.randn_like(latents), torch.sigmoid(torch.randn(len(latents), device=self.device))
        mixed = torch.lerp(latents, noise, times[:, None, None, None])
        text = self.text_encoder(batch.ids.to(self.device, non_blocking=True))[0]
        found = self.unet(mixed, times * 1000, encoder_hidden_states=text).sample
        return functional.mse_loss(found.float(), noise - latents)

    def _pixels(self, batch: Drawings) -> torch.Tensor:
        return batch.pixels.to(self.device, non_blocking=True).float() / 127.5 - 1

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def save(self, output: Path) -> None:
        """Writes the pipeline, rounded to float16."""
        pipeline = StableDiffusionPipeline(
            vae=self.autoencoder,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            unet=self.unet,
            scheduler=architecture.new_scheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipeline.to(torch.float16).save_pretrained(output)


def _log(stage: str, progress: Progress, text: str) -> None:
    print(f"{stage:8} step {progress.done_steps:6}  {progress.elapsed_seconds:6.0f} s  {text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14, help="processes that draw")
    parser.add_argument("--pictures", type=int, default=512, help="in a step")
    parser.add_argument("--autoencoder-seconds", type=float, default=240)
    parser.add_argument("--seconds", type=float, default=360, help="for the flow")
    parser.add_argument("--steps", type=int, default=100_000, help="at most, of either")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="the highest learning rate")
    return parser.parse_args()


def main() -> None:
    """Trains as the arguments say."""
    arguments = _arguments()
    # Each worker process tokenizes with one thread; more threads would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    trainer = Trainer(torch.device(arguments.device), arguments.rate)
    batches = in_workers(RandomDrawings(trainer.tokenizer, arguments.seed, arguments.pictures), arguments.workers)
    trainer.train_autoencoder(Progress(arguments.steps, arguments.autoencoder_seconds), batches)
    trainer.train_unet(Progress(arguments.steps, arguments.seconds), batches, arguments.output)


if __name__ == "__main__":
    main()
