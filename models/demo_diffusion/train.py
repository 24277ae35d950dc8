"""Trains the checkpoint: first the autoencoder, then the text encoder and the network that removes noise.

    python -m models.demo_diffusion.train --device cuda --output /tmp/demo_diffusion

The network learns a rectified flow: from x = (1 - t) latent + t noise, it predicts noise - latent.
"""

import argparse
import copy
import os
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from torch import nn
from torch.nn import functional

from models.demo.progress import Every, Progress
from models.demo.train import Optimizer
from models.demo_diffusion import architecture
from models.demo_diffusion.drawings import Drawings, Drawn, RandomDrawings, in_workers

_REPORTS = 30
_DIVERGENCE_WEIGHT = 1e-6
_AVERAGED = 0.999  # of the weights that are saved, from step to step
_SCALE_PICTURES = 4096
_DRAWN_AT_ONCE = 256  # by a worker


class Trainer:
    """A pipeline in training."""

    def __init__(self, device: torch.device, rate: float, begin: Path | None) -> None:
        """With random weights, or with those of the checkpoint `begin`."""
        self.device = device
        self.rate = rate
        self.tokenizer = architecture.new_tokenizer()
        self.autoencoder = architecture.new_autoencoder()
        self.unet = architecture.new_unet()
        self.text_encoder = architecture.new_text_encoder()
        if begin is not None:
            found = StableDiffusionPipeline.from_pretrained(begin, torch_dtype=torch.float32)
            self.autoencoder, self.unet, self.text_encoder = found.vae, found.unet, found.text_encoder
        for part in (self.autoencoder, self.unet, self.text_encoder):
            part.to(device).train()

    def train_autoencoder(self, progress: Progress, drawn: Drawn, pictures: int) -> None:
        """Teaches it to write a picture as latents and to read it back, and measures the latents' scale."""
        optimizer, report = Optimizer([(self.autoencoder, self.rate)]), Every(_REPORTS)
        for share in progress.shares():
            pixels = self._pixels(drawn.take(pictures))
            with self._autocast():
                latents = self.autoencoder.encode(pixels).latent_dist
                again = self.autoencoder.decode(latents.sample()).sample
            wrong = again.float() - pixels
            difference = wrong.abs().mean() + wrong.square().mean()
            # Corners and points are what shapes are told apart by.
            edges = wrong.diff(dim=-1).abs().mean() + wrong.diff(dim=-2).abs().mean()
            loss = difference + edges + _DIVERGENCE_WEIGHT * latents.kl().mean()
            optimizer.step(loss, share)
            if report.is_due(share):
                _log("pictures", progress, f"difference {difference.item():.4f}, {drawn.count} drawn")
        self._measure_scale(drawn)

    @torch.no_grad()
    def _measure_scale(self, drawn: Drawn) -> None:
        whole = self.autoencoder.encode(self._pixels(drawn.take(_SCALE_PICTURES))).latent_dist.mode()
        self.autoencoder.register_to_config(scaling_factor=round(1 / whole.std().item(), 4), shift_factor=None)

    def train_unet(self, progress: Progress, drawn: Drawn, pictures: int, output: Path) -> None:
        """Teaches the flow from noise to pictures, given their prompts, and saves the averaged weights."""
        learner = nn.ModuleDict({"unet": self.unet, "text_encoder": self.text_encoder})
        averaged = copy.deepcopy(learner)
        optimizer, report = Optimizer([(learner, self.rate)]), Every(_REPORTS)
        for share in progress.shares():
            with self._autocast():
                loss = self._flow_loss(drawn.take(pictures))
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
    parser.add_argument("--begin", type=Path, help="a checkpoint whose training goes on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14, help="processes that draw")
    parser.add_argument("--pictures", type=int, default=512, help="in a step")
    parser.add_argument("--drawn", type=int, default=1_000_000, help="pictures that are kept on the device")
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
    trainer = Trainer(torch.device(arguments.device), arguments.rate, arguments.begin)
    batches = in_workers(RandomDrawings(trainer.tokenizer, arguments.seed, _DRAWN_AT_ONCE), arguments.workers)
    drawn = Drawn(batches, trainer.device, arguments.drawn)
    trainer.train_autoencoder(Progress(arguments.steps, arguments.autoencoder_seconds), drawn, arguments.pictures)
    trainer.train_unet(Progress(arguments.steps, arguments.seconds), drawn, arguments.pictures, arguments.output)


if __name__ == "__main__":
    main()
