"""`baton models`: the served models, their limits, and the number of workers of each role."""

import argparse

from baton.enum_names import value_name
from baton.inference.v1 import media_pb2, model_pb2
from cli.connection import connect
from cli.terminal import output, table
from engine_protocol.roles import roles


async def run(arguments: argparse.Namespace) -> int:
    """Prints a table of models."""
    async with connect(arguments) as client:
        models = await client.models()
    if not models:
        print("no model is served: no worker is ready (`baton workers` lists those that are registered)")
        return 0
    columns = ["model", "context", "vocabulary", "capabilities", *roles()]
    numbers = columns[1:3] + columns[4:]
    output().print(table(columns, [_row(each) for each in models], numbers=numbers))
    return 0


def _row(model: model_pb2.Model) -> list[str]:
    limits = model.limits
    return [
        model.name,
        str(limits.max_context_tokens),
        str(limits.vocab_size),
        ", ".join(_abilities(model)) or "-",
        *(str(model.workers[role]) for role in roles()),
    ]


def _abilities(model: model_pb2.Model) -> list[str]:
    capabilities = model.capabilities
    named = {
        "chat": capabilities.chat,
        "guided decoding": capabilities.guided_decoding,
        "LoRA": capabilities.lora,
        "several answers": capabilities.multiple_answers,
        "tools": capabilities.tools,
        "reasoning": capabilities.reasoning,
        "logprobs": capabilities.logprobs,
        f"embeddings of {model.embedding.dimensions}": model.HasField("embedding"),
        f"pictures of {model.image_generation.width} x {model.image_generation.height}": model.HasField(
            "image_generation"
        ),
    }
    modalities = [value_name(media_pb2.Modality, each) for each in capabilities.modalities]
    return [name for name, able in named.items() if able] + modalities
