"""`baton models`: what is served, within which limits, by how many workers."""

import argparse

from baton.inference.v1 import media_pb2, model_pb2

from client.connection import connect
from client.terminal import output, table


async def run(arguments: argparse.Namespace) -> int:
    """Prints a table of models."""
    async with connect(arguments) as client:
        models = await client.models()
    if not models:
        print("no model is served: no worker is ready (`baton workers` lists those that are registered)")
        return 0
    columns = ["model", "context", "vocabulary", "can", "encode", "prefill", "decode"]
    numbers = ["context", "vocabulary", "encode", "prefill", "decode"]
    output().print(table(columns, [_row(each) for each in models], numbers=numbers))
    return 0


def _row(model: model_pb2.Model) -> list[str]:
    limits = model.limits
    return [
        model.name,
        str(limits.max_context_tokens),
        str(limits.vocab_size),
        ", ".join(_abilities(model.capabilities)) or "-",
        str(model.encode_workers),
        str(model.prefill_workers),
        str(model.decode_workers),
    ]


def _abilities(capabilities: model_pb2.ModelCapabilities) -> list[str]:
    named = {
        "chat": capabilities.chat,
        "guided decoding": capabilities.guided_decoding,
        "LoRA": capabilities.lora,
        "several answers": capabilities.multiple_answers,
        "logprobs": capabilities.logprobs,
    }
    modalities = [media_pb2.Modality.Name(each).removeprefix("MODALITY_").lower() for each in capabilities.modalities]
    return [name for name, able in named.items() if able] + modalities
