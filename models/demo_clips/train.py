"""Trains the checkpoint from the demonstration model for pictures, whose autoencoder it keeps.

    python -m models.demo_clips.train --device cuda --output /tmp/demo_clips

The network learns the same flow as that of the pictures, of all frames of a clip at once: from
x = (1 - t) latents + t noise, it predicts noise - latents.
"""

import argparse
import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import AnimateDiffPipeline, StableDiffusionPipeline
from diffusers.models.attention_processor import Attention, AttnProcessor
from torch import nn
from torch.nn import functional

from models.demo.progress import Every, Progress
from models.demo.train import Optimizer
from models.demo_clips import architecture
from models.demo_clips.clips import FRAMES, RandomClips
from models.demo_diffusion.drawings import Drawings, Drawn, in_workers

PICTURES = Path(__file__).parents[1] / "demo_diffusion"

_REPORTS = 40
_AVERAGED = 0.999  # of the weights that are saved, from step to step
_DRAWN_AT_ONCE = 32  # by a worker


class Trainer:
    """A pipeline in training."""

    def __init__(self, device: torch.device, rate: float, begin: Path | None) -> None:
        """With the weights of the pictures' model, or with those of the checkpoint `begin`."""
        self.device = device
        self.rate = rate
        pictures = StableDiffusionPipeline.from_pretrained(PICTURES, dtype=torch.float32)
        self.autoencoder = pictures.vae.to(device).eval().requires_grad_(False)
        self.learner = nn.ModuleDict(
            {
                "unet": architecture.unet_of(pictures.unet),
                "text_encoder": architecture.text_encoder_of(pictures.text_encoder),
            }
        )
        if begin is not None:
            begun = AnimateDiffPipeline.from_pretrained(begin, dtype=torch.float32)
            self.learner = nn.ModuleDict({"unet": begun.unet, "text_encoder": begun.text_encoder})
        self.learner.to(device).train()
        for name, module in self.learner["unet"].named_modules():
            # Faster than fused kernels, for eight frames.
            if isinstance(module, Attention) and "motion_modules" in name:
                module.set_processor(AttnProcessor())
        self.averaged = copy.deepcopy(self.learner)

    def train(self, progress: Progress, drawn: Drawn, clips: int) -> None:
        """Teaches the flow from noise to clips, given their prompts."""
        optimizer, report = Optimizer([(self.learner, self.rate)]), Every(_REPORTS)
        for share in progress.shares():
            with self._autocast():
                loss = self._flow_loss(drawn.take(clips))
            optimizer.step(loss, share)
            keep = min(_AVERAGED, progress.done_steps / (progress.done_steps + 10))
            with torch.no_grad():
                torch._foreach_lerp_(list(self.averaged.parameters()), list(self.learner.parameters()), 1 - keep)
            if report.is_due(share):
                text = f"loss {loss.item():.4f}, {drawn.count} drawn"
                print(f"step {progress.done_steps:6}  {progress.elapsed_seconds:6.0f} s  {text}", flush=True)

    def _flow_loss(self, batch: Drawings) -> torch.Tensor:
        latents = batch.pixels.float()
        times = architecture.shifted(torch.sigmoid(torch.randn(len(latents), device=self.device)))
        noise = torch.randn_like(latents)
        mixed = torch.lerp(latents, noise, times[:, None, None, None, None])
        text = self.learner["text_encoder"](batch.ids)[0].repeat_interleave(FRAMES, dim=0)
        found = self.learner["unet"](mixed, times * 1000, encoder_hidden_states=text).sample
        return functional.mse_loss(found.float(), noise - latents)

    @torch.no_grad()
    def latents(self, batches: Iterator[Drawings]) -> Iterator[Drawings]:
        """Those of the clips, as (n, channels, frames, side, side) in float16, in the place of their pixels."""
        scale = self.autoencoder.config.scaling_factor
        for batch in batches:
            frames = batch.pixels.to(self.device).flatten(0, 1).float() / 127.5 - 1
            with self._autocast():
                found = self.autoencoder.encode(frames).latent_dist.mode()
            yield Drawings((found * scale).unflatten(0, (-1, FRAMES)).transpose(1, 2).half(), batch.ids)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def save(self, output: Path) -> None:
        """Writes the pipeline, rounded to float16, without the autoencoder."""
        pipeline = AnimateDiffPipeline(
            vae=self.autoencoder,
            text_encoder=self.averaged["text_encoder"],
            tokenizer=architecture.new_tokenizer(),
            unet=self.averaged["unet"],
            motion_adapter=None,
            scheduler=architecture.new_scheduler(),
        )
        pipeline.to(torch.float16).save_pretrained(output)
        shutil.rmtree(output / "vae")
        (output / "vae").symlink_to(os.path.relpath(PICTURES / "vae", output))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--begin", type=Path, help="a checkpoint whose training goes on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14, help="processes that draw")
    parser.add_argument("--clips", type=int, default=64, help="in a step")
    parser.add_argument("--drawn", type=int, default=150_000, help="clips that are kept on the device")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--steps", type=int, default=100_000, help="at most")
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    return parser.parse_args()


def main() -> None:
    """Trains as the arguments say."""
    arguments = _arguments()
    # Each worker process tokenizes with one thread; more threads would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    clips = RandomClips(architecture.new_tokenizer(), arguments.seed, _DRAWN_AT_ONCE)
    batches = in_workers(clips, arguments.workers)
    trainer = Trainer(torch.device(arguments.device), arguments.rate, arguments.begin)
    drawn = Drawn(trainer.latents(batches), trainer.device, arguments.drawn)
    trainer.train(Progress(arguments.steps, arguments.seconds), drawn, arguments.clips)
    trainer.save(arguments.output)


if __name__ == "__main__":
    main()
