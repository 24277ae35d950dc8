"""Evaluates a checkpoint: draws held-out prompts, and has the demonstration model say what is in the pictures.

    python -m models.demo_diffusion.evaluate models/demo_diffusion --samples 100

A picture is right if the answer is the prompt, word for word.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from models.demo.evaluate import Examiner
from models.demo.exercises.exercise import IMAGE
from models.demo.exercises.generate_data import EOS
from models.demo.exercises.scenes import Scene
from models.demo.exercises.scenes import draw as scene_picture
from models.demo_diffusion.drawings import held_out_scenes

READER = Path(__file__).parents[1] / "demo"

_AT_ONCE = 50


def draw(
    pipeline: StableDiffusionPipeline, prompts: Sequence[str], seed: int, steps: int, guidance: float
) -> list[Image.Image]:
    """The picture of each prompt, each from its own seed, so that how many are drawn at once does not count."""
    pictures: list[Image.Image] = []
    for start in range(0, len(prompts), _AT_ONCE):
        some = list(prompts[start : start + _AT_ONCE])
        seeds = [torch.Generator("cpu").manual_seed(seed + start + index) for index in range(len(some))]
        pictures += pipeline(some, num_inference_steps=steps, guidance_scale=guidance, generator=seeds).images
    return pictures


@torch.no_grad()
def written_and_read_back(pipeline: StableDiffusionPipeline, scenes: Iterable[Scene]) -> list[Image.Image]:
    """Real pictures after the autoencoder alone: what it blurs, no drawing can have."""
    pixels = pipeline.image_processor.preprocess([scene_picture(scene) for scene in scenes]).to(pipeline.vae.device)
    latents = pipeline.vae.encode(pixels.to(pipeline.vae.dtype)).latent_dist.mode()
    return pipeline.image_processor.postprocess(pipeline.vae.decode(latents).sample)


def descriptions(examiner: Examiner, pictures: Sequence[Image.Image]) -> list[str]:
    """The demonstration model's greedy answers to `What is in the picture?`."""
    found: list[str] = []
    for start in range(0, len(pictures), _AT_ONCE):
        some = list(pictures[start : start + _AT_ONCE])
        prompts = [f"{IMAGE}\nWhat is in the picture?"] * len(some)
        inputs = examiner.processor(text=prompts, images=some, add_special_tokens=True, return_tensors="pt")
        with torch.inference_mode():
            ids = examiner.model.generate(**inputs.to(examiner.model.device), max_new_tokens=48, do_sample=False)
        texts = examiner.processor.tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :])
        found += [text.partition(EOS)[0].strip() for text in texts]
    return found


def main() -> None:
    """Prints the share that is right, and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--steps", type=int, nargs="+", default=[20])
    parser.add_argument("--guidance", type=float, nargs="+", default=[3.0])
    arguments = parser.parse_args()
    pipeline = StableDiffusionPipeline.from_pretrained(arguments.checkpoint, torch_dtype=torch.float32)
    pipeline.to(arguments.device).set_progress_bar_config(disable=True)
    examiner = Examiner.of_checkpoint(READER, arguments.device)
    scenes = held_out_scenes(arguments.samples, arguments.seed)
    prompts = list(scenes)
    read = zip(prompts, descriptions(examiner, written_and_read_back(pipeline, scenes.values())), strict=True)
    print(f"real pictures behind the autoencoder: {sum(pair[0] == pair[1] for pair in read)} right", flush=True)
    for steps in arguments.steps:
        for guidance in arguments.guidance:
            pictures = draw(pipeline, prompts, arguments.seed, steps, guidance)
            pairs = list(zip(prompts, descriptions(examiner, pictures), strict=True))
            wrong = [pair for pair in pairs if pair[0] != pair[1]]
            print(f"steps {steps} guidance {guidance:g}: {len(pairs) - len(wrong)} of {len(pairs)} right", flush=True)
    for asked, seen in wrong:
        print(f"asked: {asked}\n seen: {seen}")


if __name__ == "__main__":
    main()
