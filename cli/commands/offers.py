"""The offers of a deployment, and what its tenants use: `baton info`, `baton models` and `baton tenants`."""

import argparse

from google.protobuf.json_format import MessageToJson

from baton.enum_names import value_name
from baton.inference.v1 import cluster_service_pb2, media_pb2, model_pb2, server_info_pb2
from cli.connection import connect
from cli.terminal import output, table
from engine_protocol.roles import roles


async def list_models(arguments: argparse.Namespace) -> int:
    """Prints a table of models."""
    async with connect(arguments) as client:
        models = await client.models()
    if not models:
        print("no model is served: no worker is ready (`baton workers` lists those that are registered)")
        return 0
    columns = ["model", "context", "vocabulary", "capabilities", *roles()]
    numbers = columns[1:3] + columns[4:]
    output().print(table(columns, [_model_row(each) for each in models], numbers=numbers))
    return 0


def _model_row(model: model_pb2.Model) -> list[str]:
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


async def show_info(arguments: argparse.Namespace) -> int:
    """Prints the models with their features, the limits and the façades; or all of it as JSON."""
    async with connect(arguments) as client:
        info = await client.server_info()
    if arguments.json:
        print(MessageToJson(info, preserving_proto_field_name=True, ensure_ascii=False))
        return 0
    print(f"Baton {info.version}, router {info.router_id}, routing policy {info.routing_policy}\n")
    for offer in info.models:
        output().print(table([offer.model.name, ""], _offer_rows(offer)))
    output().print(table(["limits", ""], _limit_rows(info.limits), numbers=[""]))
    facades = [[each.name, each.address or "on this port", "TLS" if each.has_tls else ""] for each in info.facades]
    output().print(table(["façade", "address", ""], facades))
    return 0


def _offer_rows(offer: server_info_pb2.ModelOffer) -> list[list[str]]:
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


_TENANT_NUMBERS = ("running", "waiting", "longest wait", "work/min", "share", "requests left", "tokens left")


async def list_tenants(arguments: argparse.Namespace) -> int:
    """Prints a table of tenants."""
    async with connect(arguments) as client:
        response = await client.tenants()
    if response.tenants:
        output().print(
            table(
                ("tenant", *_TENANT_NUMBERS), [_tenant_row(each) for each in response.tenants], numbers=_TENANT_NUMBERS
            )
        )
    else:
        print("no tenant is known: none has sent a request, or admission.fairness is none and there are no quotas")
    for router in response.missing_routers:
        print(f"router {router} did not answer: its part is missing")
    return 0


def _tenant_row(usage: cluster_service_pb2.TenantUsage) -> list[str]:
    return [
        usage.tenant or "(default)",
        str(usage.running),
        str(usage.waiting),
        f"{usage.longest_wait.ToNanoseconds() / 1e9:.1f} s" if usage.waiting else "-",
        f"{usage.recent_work:.0f}",
        f"{usage.share:.0%}",
        f"{usage.requests_left:.0f}" if usage.HasField("requests_left") else "-",
        f"{usage.tokens_left:.0f}" if usage.HasField("tokens_left") else "-",
    ]
