"""`baton info`: what a deployment offers."""

import argparse

from google.protobuf.json_format import MessageToJson

from baton.inference.v1 import server_info_pb2
from cli.connection import connect
from cli.terminal import output, table


async def run(arguments: argparse.Namespace) -> int:
    """Prints the models with their features, the limits and the façades; or all of it as JSON."""
    async with connect(arguments) as client:
        info = await client.server_info()
    if arguments.json:
        print(MessageToJson(info, preserving_proto_field_name=True, ensure_ascii=False))
        return 0
    print(f"Baton {info.version}, router {info.router_id}, routing policy {info.routing_policy}\n")
    for offer in info.models:
        output().print(table([offer.model.name, ""], _model_rows(offer)))
    output().print(table(["limits", ""], _limit_rows(info.limits), numbers=[""]))
    facades = [[each.name, each.address or "on this port", "TLS" if each.has_tls else ""] for each in info.facades]
    output().print(table(["façade", "address", ""], facades))
    return 0


def _model_rows(offer: server_info_pb2.ModelOffer) -> list[list[str]]:
    model = offer.model
    rows = {
        "features": ", ".join(offer.features),
        "unsupported sampling": ", ".join(model.capabilities.unsupported_sampling),
        "context": f"{model.limits.max_context_tokens} tokens, vocabulary {model.limits.vocab_size}",
        "roles": ", ".join(offer.roles),
        "engines": ", ".join(offer.engines),
        "dtype": offer.dtype,
        "KV block": f"{offer.block_tokens} tokens" if offer.block_tokens else "",
        "KV transports": ", ".join(offer.transports),
        "embeddings": f"{model.embedding.dimensions} numbers, pooling {model.embedding.pooling}, inputs of at most "
        f"{model.embedding.max_input_tokens} tokens"
        if model.HasField("embedding")
        else "",
        **offer.engine_settings,
    }
    return [[name, value] for name, value in rows.items() if value]


def _limit_rows(limits: server_info_pb2.ServerLimits) -> list[list[str]]:
    rows = []
    for field in limits.DESCRIPTOR.fields:
        value = getattr(limits, field.name)
        rows.append([field.name, f"{value.seconds} s" if field.message_type else str(value)])
    return rows
