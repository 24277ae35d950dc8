"""Weights that outlive the process: a worker that starts again maps them, and neither reads nor converts a checkpoint.

The fused model is made of them alone. Transformers' modules are built without memory, and get the tensors.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog
import torch

from baton.errors import ConfigError
from baton.version import __version__
from services.engines.kv import KvLayout
from services.engines.memory.device_memory import DeviceUnavailable
from services.engines.memory.tensor_file import TensorFile, read_tensors, write_tensors
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kernels.paged_ops import HeadNorms
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.fused_model import FusedLayer, FusedWeights, Projection, why_not
from services.engines.pytorch.model.loading import (
    LoadedModel,
    choose_device,
    kind_of,
    load_model,
    name_of,
    read_config,
    use_device,
)
from services.engines.pytorch.model.support import TextShape
from services.engines.rules import ImageRules
from services.keeper.client import KeeperClient

_log = structlog.get_logger(__name__)

_NAME = "weights"
_VERSION = 2


def load_kept(config: PyTorchConfig, keeper: KeeperClient) -> LoadedModel:
    """Returns the model on the weights that the keeper holds; loads them, and has them kept, if it has none that fit.

    On a GPU of fused models alone. Raises ConfigError as load_model does.
    """
    wanted, device = _fingerprint(config), choose_device(config)
    kept = keeper.get(_NAME, wanted)
    if kept.descriptors:
        use_device(device)
        return _bound(config, read_tensors(kept.descriptors, device), device)
    if kept.stale:
        _log.warning("kept weights do not fit; loading the checkpoint", kept=kept.stale[:12], wanted=wanted[:12])
    model = load_model(config)
    if _is_fused(config, device) and (config.lora or why_not(model.module.config)):  # type: ignore[arg-type]
        return model  # which is refused, with the reason
    try:
        content = read_tensors(_write(config, model, keeper, wanted), device)
    except (OSError, DeviceUnavailable) as error:
        _log.warning("weights cannot be kept; the worker goes on without", error=str(error))
        return model
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the weights that were copied: the pool takes what is free
    return _bound(config, content, device)


def _write(config: PyTorchConfig, model: LoadedModel, keeper: KeeperClient, fingerprint: str) -> list[int]:
    facts: dict[str, Any] = {
        "shape": asdict(model.shape),
        "dtype": name_of(model.dtype),
        "eos_token_ids": model.eos_token_ids,
        "images": None if model.images is None else asdict(model.images),
    }
    if _is_fused(config, model.device):
        weights = FusedWeights.of(model.module, model.shape.max_context_tokens)
        tensors = dict(_named(weights))
        norms = weights.layers[0].head_norms
        facts |= {
            "layers": len(weights.layers),
            "eps": weights.eps,
            "scaling": weights.scaling,
            "norm_eps": norms.eps if norms else 0.0,
        }
    else:
        tensors = _tensors_of(model.module)
    descriptors = write_tensors(tensors, facts)
    keeper.put(_NAME, fingerprint, descriptors)
    return descriptors


def _bound(config: PyTorchConfig, content: TensorFile, device: torch.device) -> LoadedModel:
    facts = content.facts
    images = facts["images"]
    dtype: torch.dtype = getattr(torch, facts["dtype"])
    fused = _fused(content) if _is_fused(config, device) else None
    module = torch.nn.Module() if fused is not None else _module(config, dtype, content.tensors)
    return LoadedModel(
        module=module,
        shape=TextShape(**facts["shape"]),
        device=device,
        dtype=dtype,
        eos_token_ids=tuple(facts["eos_token_ids"]),
        images=images and ImageRules(**(images | {"embedding_layout": KvLayout(**images["embedding_layout"])})),
        fused=fused,
        kept_bytes=content.tensors["embedding"].untyped_storage().nbytes() if device.type == "cuda" else 0,
    )


def _module(config: PyTorchConfig, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Builds transformers' module without memory, and gives it these tensors."""
    from services.engines.pytorch.model import attention

    attention.register()
    model_config = read_config(config.model)
    with torch.device("meta"):
        build = getattr(kind_of(model_config), "_from_config", None) or kind_of(model_config).from_config
        module: torch.nn.Module = build(model_config, attn_implementation=attention.NAME, dtype=dtype)
    known: dict[int, torch.nn.Parameter] = {}
    for name, tensor in tensors.items():
        owner, _, own = name.rpartition(".")
        part = module.get_submodule(owner)
        if own in part._parameters:
            # Tied weights stay one parameter.
            part._parameters[own] = known.setdefault(id(tensor), torch.nn.Parameter(tensor, requires_grad=False))
        else:
            part._buffers[own] = tensor
    missing = [name for name, tensor in _every_tensor(module) if tensor.is_meta]
    assert not missing, f"not kept: {missing[:5]}"
    return module.train(False)


def _tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, also those that a checkpoint does not have."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _every_tensor(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Also those that are attributes of a module, and neither parameters nor buffers."""
    yield from _tensors_of(module).items()
    for path, part in module.named_modules():
        yield from ((f"{path}.{name}", each) for name, each in vars(part).items() if isinstance(each, torch.Tensor))


def _named(weights: FusedWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a fused model that there are."""
    yield from {"embedding": weights.embedding, "norm": weights.norm, "cos": weights.angles[0]}.items()
    yield "sin", weights.angles[1]
    yield from _named_projection("head", weights.head)
    for index, layer in enumerate(weights.layers):
        yield from {f"{index}.input_norm": layer.input_norm, f"{index}.post_norm": layer.post_norm}.items()
        for name in ("qkv", "output", "gate_up", "down"):
            yield from _named_projection(f"{index}.{name}", getattr(layer, name))
        if layer.head_norms is not None:
            yield from {f"{index}.q_norm": layer.head_norms.query, f"{index}.k_norm": layer.head_norms.key}.items()


def _named_projection(name: str, projection: Projection) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{name}.weight", projection.weight
    if projection.bias is not None:
        yield f"{name}.bias", projection.bias


def _fused(content: TensorFile) -> FusedWeights:
    tensors, facts = content.tensors, content.facts

    def projection(name: str) -> Projection:
        return Projection(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def layer(index: int) -> FusedLayer:
        query, key = tensors.get(f"{index}.q_norm"), tensors.get(f"{index}.k_norm")
        return FusedLayer(
            input_norm=tensors[f"{index}.input_norm"],
            qkv=projection(f"{index}.qkv"),
            head_norms=None if query is None or key is None else HeadNorms(query, key, facts["norm_eps"]),
            output=projection(f"{index}.output"),
            post_norm=tensors[f"{index}.post_norm"],
            gate_up=projection(f"{index}.gate_up"),
            down=projection(f"{index}.down"),
        )

    return FusedWeights(
        embedding=tensors["embedding"],
        layers=[layer(index) for index in range(facts["layers"])],
        norm=tensors["norm"],
        eps=facts["eps"],
        head=projection("head"),
        scaling=facts["scaling"],
        angles=(tensors["cos"], tensors["sin"]),
    )


def _is_fused(config: PyTorchConfig, device: torch.device) -> bool:
    """True if the engine computes by the fused model, or is refused."""
    return config.execution == "fused" or device.type == "cuda"


def _fingerprint(config: PyTorchConfig) -> str:
    """Of the checkpoint's weights and configurations, and of all that decides how they are in memory."""
    folder = config.model
    digest = hashlib.sha256(_checkpoint(folder).encode())
    for path in sorted(folder.glob("*.json")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    form = [_VERSION, config.device, config.dtype, config.execution, config.max_context_tokens, version("torch")]
    versions = [version("transformers"), __version__]
    digest.update(json.dumps([*form, *versions, checkpoint.changes(folder)]).encode())
    return digest.hexdigest()


def _checkpoint(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"engine.model: {folder} is not a checkpoint folder: it has no config.json")
    return checkpoint.fingerprint(folder)
