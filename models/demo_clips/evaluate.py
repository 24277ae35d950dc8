"""Evaluates a checkpoint: draws held-out prompts, and has the demonstration model say what is in each frame.

    python -m models.demo_clips.evaluate models/demo_clips --samples 100

A clip is right if the answer is the prompt's figure for each frame, word for word, and the figure moves as asked from
each frame to the next: at least a pixel that way, and less than one aside.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import torch
from diffusers import AnimateDiffPipeline
from PIL import Image

from models.demo.evaluate import Examiner
from models.demo_clips.clips import DIRECTIONS, FRAMES, held_out_clips, held_out_prompts
from models.demo_diffusion.evaluate import READER, descriptions

_AT_ONCE = 25

Frames = Sequence[Image.Image]


def draw(pipeline: AnimateDiffPipeline, prompts: Sequence[str], seed: int, steps: int, guidance: float) -> list[Frames]:
    """The frames of each prompt, each from its own seed, so that how many are drawn at once does not count."""
    found: list[Frames] = []
    for start in range(0, len(prompts), _AT_ONCE):
        some = list(prompts[start : start + _AT_ONCE])
        found += pipeline(
            some,
            num_frames=FRAMES,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=[torch.Generator("cpu").manual_seed(seed + start + index) for index in range(len(some))],
        ).frames
    return found


@torch.no_grad()
def written_and_read_back(pipeline: AnimateDiffPipeline, frames: Frames) -> Frames:
    """Real frames after the autoencoder alone."""
    pixels = pipeline.video_processor.preprocess(list(frames)).to(pipeline.vae.device)
    latents = pipeline.vae.encode(pixels).latent_dist.mode()
    found: Frames = pipeline.video_processor.postprocess(pipeline.vae.decode(latents).sample)
    return found


def centre(frame: Image.Image) -> tuple[float, float]:
    """Right and down, of what is not like the corners, in pixels."""
    pixels = numpy.asarray(frame, dtype=float)
    background = numpy.median([pixels[0, 0], pixels[0, -1], pixels[-1, 0], pixels[-1, -1]], axis=0)
    weights = numpy.abs(pixels - background).sum(2)
    weights = numpy.where(weights > weights.max() / 2, weights, 0)
    down, across = numpy.indices(weights.shape)
    return float((weights * across).sum() / weights.sum()), float((weights * down).sum() / weights.sum())


def moves_towards(direction: str, frames: Frames) -> bool:
    """True if what is in the frames moves so, and not aside, from each one to the next."""
    (across, down), centres = DIRECTIONS[direction], [centre(frame) for frame in frames]
    steps = [(x - before_x, y - before_y) for (before_x, before_y), (x, y) in itertools.pairwise(centres)]
    return all(x * across + y * down >= 1 and abs(x * down + y * across) < 1 for x, y in steps)


def wrong(examiner: Examiner, prompts: Sequence[str], clips: Sequence[Frames]) -> Iterator[str]:
    """A line for each clip of another figure or another way."""
    seen = descriptions(examiner, [frame for frames in clips for frame in frames])
    for index, (prompt, frames) in enumerate(zip(prompts, clips, strict=True)):
        figure, direction = prompt.split(" moves ")
        figures, moves = seen[index * FRAMES : (index + 1) * FRAMES], moves_towards(direction, frames)
        if set(figures) != {figure} or not moves:
            centres = " ".join("({:.0f},{:.0f})".format(*centre(frame)) for frame in frames)
            yield f"asked: {prompt}\n seen: {sorted(set(figures))}, moves so: {moves}, {centres}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=100, help="clips, of the held-out prompts in turns")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--steps", type=int, nargs="+", default=[20])
    parser.add_argument("--guidance", type=float, nargs="+", default=[3.0])
    parser.add_argument("--strip", type=Path, help="a picture of the first clips' frames")
    return parser.parse_args()


def main() -> None:
    """Prints the share that is right, and what is wrong."""
    arguments = _arguments()
    pipeline = AnimateDiffPipeline.from_pretrained(arguments.checkpoint, dtype=torch.float32).to(arguments.device)
    pipeline.set_progress_bar_config(disable=True)
    examiner = Examiner.of_checkpoint(READER, arguments.device)
    known = held_out_prompts()
    prompts = list(itertools.islice(itertools.cycle(known), arguments.samples))
    real = [clip.frames() for clip in held_out_clips(known, arguments.seed)]
    for name, clips in (
        ("real", real),
        ("real, behind the autoencoder", [written_and_read_back(pipeline, frames) for frames in real]),
    ):
        print(f"{name}: {len(real) - len(list(wrong(examiner, known, clips)))} of {len(real)} right", flush=True)
    for steps, guidance in itertools.product(arguments.steps, arguments.guidance):
        drawn = draw(pipeline, prompts, arguments.seed, steps, guidance)
        lines = list(wrong(examiner, prompts, drawn))
        right = len(prompts) - len(lines)
        print(f"steps {steps} guidance {guidance:g}: {right} of {len(prompts)} right", flush=True)
        print("\n".join(lines), flush=True)
    if arguments.strip:
        strip(drawn[:24]).save(arguments.strip)


def strip(clips: Sequence[Frames]) -> Image.Image:
    """One picture: a row for each clip."""
    rows = [numpy.concatenate([numpy.asarray(frame) for frame in frames], axis=1) for frames in clips]
    return Image.fromarray(numpy.concatenate(rows))


if __name__ == "__main__":
    main()
