"""`baton draw` writes pictures into files; `baton embed` prints the vectors of texts."""

import argparse
import asyncio
import json
import sys
from contextlib import aclosing
from pathlib import Path

from baton.connection.settings import CALL_SECONDS
from baton.errors import InvalidRequest
from baton.inference.v1 import image_pb2
from cli.connection import connect
from cli.request import standard_input, text_of


async def draw(arguments: argparse.Namespace) -> int:
    """Writes each picture when it is there, and says where, and by which seed, on standard error."""
    prompt = standard_input("prompt") if arguments.prompt == "-" else arguments.prompt
    async with connect(arguments, arguments.tenant) as client:
        drawing = client.draw(
            text_of("prompt", prompt),
            model=text_of("model", arguments.model),
            negative_prompt=text_of("negative_prompt", arguments.negative_prompt),
            guidance_scale=arguments.guidance_scale,
            width=arguments.width,
            height=arguments.height,
            steps=arguments.steps,
            seed=arguments.seed,
            number=arguments.number,
            timeout_seconds=arguments.timeout or CALL_SECONDS,
        )
        async with aclosing(drawing) as events:
            async for event in events:
                await _show(event, Path(arguments.output))
    return 0


async def _show(event: image_pb2.ImageServiceGenerateResponse, output: Path) -> None:
    """Shows the progress, if standard error is a terminal; writes a picture."""
    is_terminal = sys.stderr.isatty()
    if event.HasField("progress") and is_terminal:
        progress = event.progress
        print(f"\rpicture {progress.index + 1}: step {progress.step} of {progress.steps} ", end="", file=sys.stderr)
    if event.HasField("image"):
        image = event.image
        path = output.with_stem(f"{output.stem}-{image.index + 1}") if image.index else output
        await asyncio.to_thread(_write, path, image.data)
        begin = "\r" if is_terminal else ""
        print(f"{begin}{path}: {image.width} x {image.height}, seed {image.seed}", file=sys.stderr)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidRequest.of("output", f"{path} cannot be written: {error.strerror}") from None


async def print_vectors(arguments: argparse.Namespace) -> int:
    """Prints one line of JSON for each text, an array of numbers, and the number of tokens to standard error."""
    texts = [text_of(f"inputs[{index}]", text) for index, text in enumerate(_texts(arguments.texts))]
    async with connect(arguments, arguments.tenant) as client:
        response = await client.embed(
            texts,
            model=text_of("model", arguments.model),
            dimensions=arguments.dimensions,
            normalize=arguments.normalize,
            timeout_seconds=arguments.timeout or CALL_SECONDS,
        )
    for embedding in response.embeddings:
        # Single precision: more digits than these say nothing.
        print(json.dumps([float(f"{value:.8g}") for value in embedding.values]))
    print(f"{response.usage.prompt_tokens} tokens", file=sys.stderr)
    return 0


def _texts(words: list[str]) -> list[str]:
    if words != ["-"]:
        return words
    return standard_input("inputs").splitlines()
