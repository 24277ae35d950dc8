"""`baton embed`: prints the vectors of texts."""

import argparse
import json
import sys

from baton.connection.settings import CALL_SECONDS
from cli.connection import connect
from cli.request import standard_input, text_of


async def run(arguments: argparse.Namespace) -> int:
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
