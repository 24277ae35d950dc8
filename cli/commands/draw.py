"""`baton draw` writes pictures and clips into files; `baton embed` prints the vectors of texts."""

import argparse
import asyncio
import json
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

from baton.connection.settings import CALL_SECONDS
from baton.errors import InvalidRequest
from cli.connection import connect
from cli.outputs import require_writable
from cli.request import standard_input, text_of


async def draw(arguments: argparse.Namespace) -> int:
    """Writes each picture or clip when it is there, and says where, and by which seed, on standard error."""
    prompt = standard_input("prompt") if arguments.prompt == "-" else arguments.prompt
    options: dict[str, Any] = {
        "model": text_of("model", arguments.model),
        "negative_prompt": text_of("negative_prompt", arguments.negative_prompt),
        **{name: getattr(arguments, name) for name in ("guidance_scale", "width", "height", "steps", "seed", "number")},
        "timeout_seconds": arguments.timeout or CALL_SECONDS,
    }
    output, is_clip = Path(arguments.output), arguments.video or arguments.frames is not None
    if not is_clip and (output.suffix == ".mp4" or arguments.frames_per_second is not None):
        raise InvalidRequest.of("video", "clips need --video")
    require_writable({"output": arguments.output})
    if is_clip:
        timing = {"frames": arguments.frames, "frames_per_second": arguments.frames_per_second}
        options.update(timing, mp4=output.suffix == ".mp4")
    async with connect(arguments, arguments.tenant) as client:
        drawing = (client.draw_video if is_clip else client.draw)(text_of("prompt", prompt), **options)
        async with aclosing(drawing) as events:
            async for event in events:
                await _show(event, output)
    return 0


async def _show(event: Any, output: Path) -> None:
    """Shows the progress, if standard error is a terminal; writes a picture, a frame or a clip."""
    is_terminal = sys.stderr.isatty()
    match event.WhichOneof("event"):
        case "progress" if is_terminal:
            done = event.progress
            print(f"\r{done.index + 1}: step {done.step} of {done.steps} ", end="", file=sys.stderr)
        case "frame":
            path = _numbered(output, event.frame.index)
            await asyncio.to_thread(_write, path.with_stem(f"{path.stem}-{event.frame.number + 1}"), event.frame.data)
        case "image" | "video" as kind:
            drawn, path = getattr(event, kind), _numbered(output, getattr(event, kind).index)
            if drawn.data:
                await asyncio.to_thread(_write, path, drawn.data)
            size = f"{drawn.width} x {drawn.height}" + (f", {drawn.frames} frames" if kind == "video" else "")
            begin = "\r" if is_terminal else ""
            print(f"{begin}{path}: {size}, seed {drawn.seed}", file=sys.stderr)


def _numbered(output: Path, index: int) -> Path:
    return output.with_stem(f"{output.stem}-{index + 1}") if index else output


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
