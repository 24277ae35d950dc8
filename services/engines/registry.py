"""The kinds of engines, of Baton and of other distributions. Imports only the chosen one."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from baton.errors import ConfigError
from services.engines.base import Encoder, Engine, TextEmbedder
from services.engines.context import EngineConfig, EngineContext, RankProgress
from services.engines.diffusers.config import DiffusionConfig
from services.engines.diffusion import Diffuser
from services.engines.external.argument_places import resolve
from services.engines.pytorch.config import PyTorchConfig
from services.engines.sglang.config import SglangConfig
from services.engines.simulated.config import SimulatedConfig
from services.engines.trtllm.config import EXPERIMENTAL, TrtllmConfig
from services.engines.vllm.config import VllmConfig

ENTRY_POINTS = "baton.engines"

Follow = Callable[[Any, RankProgress, asyncio.Event], Awaitable[None]]
"""Computes for the engine of another process, until that ends. Raises ConfigError and EngineFailed."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The configuration, opening and description of a kind of engine. Open functions get an instance of `config`.

    They return context managers; entering one loads the model. They raise ConfigError for a wrong setting. `parts` are
    what roles without KV need, by the name that their RoleKind has for it.
    """

    config: type[EngineConfig]
    open_engine: Callable[[Any, EngineContext], AbstractAsyncContextManager[Engine]]
    parts: Mapping[str, Callable[[Any, EngineContext], AbstractAsyncContextManager[Any]]] = field(default_factory=dict)
    describe: Callable[[Any], list[str]] | None = None  # lines for --print-config, beyond the settings themselves
    prepare: Callable[[Any], None] | None = None  # imports what open_engine does; starts no thread, uses no GPU
    follow: Follow | None = None  # for configurations with `is_follower`


def engine_kind(kind: str) -> EngineKind:
    """Returns one of ENGINES, or an entry point. Raises ConfigError naming the kinds that exist."""
    if kind in ENGINES:
        return ENGINES[kind]
    entries = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if kind not in entries:
        raise ConfigError(f"unknown engine {kind!r}; expected one of {', '.join(sorted({*ENGINES, *entries}))}")
    try:
        found = entries[kind].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine {kind!r} cannot be loaded: {error}") from error
    if not isinstance(found, EngineKind):
        raise ConfigError(f"engine {kind!r}: {entries[kind].value} is not an EngineKind")
    return found


def read_engine_config(value: Any) -> EngineConfig:
    """Returns the configuration of the kind that `value` names. Raises ValueError, with the path of a wrong key."""
    if isinstance(value, EngineConfig):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ValueError("expected the key kind, and the keys of that engine")
    try:
        kind = engine_kind(value["kind"])
    except ConfigError as error:
        raise ValueError(error.message) from error
    return kind.config.model_validate(value)


def open_engine(config: EngineConfig, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
    """Returns the engine; entering it loads it. Raises ConfigError for a wrong setting."""
    return engine_kind(config.kind).open_engine(config, context)


def open_part(name: str, config: EngineConfig, context: EngineContext) -> AbstractAsyncContextManager[Any]:
    """Returns a part of the engine, such as its encoder; entering it loads it. Raises ConfigError if it has none."""
    opens = engine_kind(config.kind).parts.get(name)
    if opens is None:
        raise ConfigError(f"roles: the {config.kind} engine has no {name}")
    return opens(config, context)


def prepare(config: EngineConfig) -> None:
    """Does the part of opening the engine that a process may have done when it is forked. Raises ConfigError."""
    prepares = engine_kind(config.kind).prepare
    if prepares is not None:
        prepares(config)


def follow(config: EngineConfig, progress: RankProgress, stopping: asyncio.Event) -> Awaitable[None]:
    """Computes for the engine of another process. See Follow."""
    follows = engine_kind(config.kind).follow
    assert follows is not None, f"{config.kind} has followers and does not say how"
    return follows(config, progress, stopping)


def describe(config: EngineConfig) -> list[str]:
    """Returns lines for `--print-config`: values that an engine derives from its settings."""
    describes = engine_kind(config.kind).describe
    return describes(config) if describes else []


def _require_pytorch() -> None:
    """Raises ConfigError if a package of the extra `pytorch` is missing."""
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        needed = f"engine.kind: pytorch needs {' and '.join(missing)}, from the extra `pytorch`"
        raise ConfigError(f"{needed}: pip install 'baton-serving[pytorch]'")


def _open_pytorch(config: PyTorchConfig, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
    _require_pytorch()
    from services.engines.pytorch.engine import PyTorchEngine
    from services.engines.pytorch.parallel.followers import check_roles

    check_roles(config, context.roles)
    return PyTorchEngine(config, rules=context.allocation, kept=context.kept)


def _prepare_pytorch(config: PyTorchConfig) -> None:
    _require_pytorch()
    from services.engines.pytorch.preparing import prepare

    prepare(config)


def _follow_pytorch(config: PyTorchConfig, progress: RankProgress, stopping: asyncio.Event) -> Awaitable[None]:
    _require_pytorch()
    from services.engines.pytorch.parallel.multi_node.follower import follow as follow_rank_0

    return follow_rank_0(config, progress, stopping)


def _open_pytorch_encoder(config: PyTorchConfig, context: EngineContext) -> AbstractAsyncContextManager[Encoder]:
    _require_pytorch()
    from services.engines.pytorch.vision.encoder import PyTorchEncoder

    del context
    return PyTorchEncoder(config)


def _open_pytorch_embedder(config: PyTorchConfig, context: EngineContext) -> AbstractAsyncContextManager[TextEmbedder]:
    _require_pytorch()
    from services.engines.pytorch.embedding.embedder import PyTorchEmbedder

    del context
    return PyTorchEmbedder(config)


def _open_simulated(config: SimulatedConfig, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
    from services.engines.simulated.engine import SimulatedEngine

    return SimulatedEngine(config, context.allocation)


def _open_simulated_encoder(config: SimulatedConfig, context: EngineContext) -> AbstractAsyncContextManager[Encoder]:
    from services.engines.simulated.encoder import SimulatedEncoder

    del context
    return SimulatedEncoder(config)


def _open_simulated_embedder(
    config: SimulatedConfig, context: EngineContext
) -> AbstractAsyncContextManager[TextEmbedder]:
    from services.engines.simulated.encoder import SimulatedEmbedder

    del context
    return SimulatedEmbedder(config)


def _open_simulated_diffuser(config: SimulatedConfig, context: EngineContext) -> AbstractAsyncContextManager[Diffuser]:
    from services.engines.simulated.diffuser import SimulatedDiffuser

    del context
    return SimulatedDiffuser(config)


def _open_diffusers(config: DiffusionConfig, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
    del config
    raise ConfigError(f"roles: the diffusers engine has the role diffuse alone, not {', '.join(context.roles)}")


def _open_diffuser(config: DiffusionConfig, context: EngineContext) -> AbstractAsyncContextManager[Diffuser]:
    if missing := [name for name in ("torch", "transformers", "diffusers") if find_spec(name) is None]:
        needed = f"engine.kind: diffusers needs {' and '.join(missing)}, from the extra `diffusion`"
        raise ConfigError(f"{needed}: pip install 'baton-serving[diffusion]'")
    from services.engines.diffusers.engine import DiffusersEngine
    from services.engines.diffusers.replicas import ReplicatedEngine

    del context
    return DiffusersEngine(config) if config.data_parallel_size == 1 else ReplicatedEngine(config)


def _open_trtllm(config: TrtllmConfig, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
    from services.engines.trtllm.factory import open_trtllm

    return open_trtllm(config, context)


def _open_trtllm_encoder(config: TrtllmConfig, context: EngineContext) -> AbstractAsyncContextManager[Encoder]:
    from services.engines.trtllm.factory import open_trtllm_encoder

    return open_trtllm_encoder(config, context)


def _describe_trtllm(config: TrtllmConfig) -> list[str]:
    return [f"trtllm experimental = true  # {EXPERIMENTAL}", *_describe_arguments(config)]


def _describe_arguments(config: SglangConfig | TrtllmConfig | VllmConfig) -> list[str]:
    return [f"{config.kind} {line}" for line in resolve(config).describe()]


def _open_vllm(config: VllmConfig, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
    from services.engines.vllm.factory import open_vllm

    return open_vllm(config, context)


def _open_vllm_encoder(config: VllmConfig, context: EngineContext) -> AbstractAsyncContextManager[Encoder]:
    from services.engines.vllm.factory import open_vllm_encoder

    del context
    return open_vllm_encoder(config)


def _open_sglang(config: SglangConfig, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
    from services.engines.sglang.factory import open_sglang

    return open_sglang(config, context)


ENGINES: dict[str, EngineKind] = {
    "pytorch": EngineKind(
        PyTorchConfig,
        _open_pytorch,
        {"encoder": _open_pytorch_encoder, "embedder": _open_pytorch_embedder},
        prepare=_prepare_pytorch,
        follow=_follow_pytorch,
    ),
    "diffusers": EngineKind(DiffusionConfig, _open_diffusers, {"diffuser": _open_diffuser}),
    "sglang": EngineKind(SglangConfig, _open_sglang, describe=_describe_arguments),
    "simulated": EngineKind(
        SimulatedConfig,
        _open_simulated,
        {
            "encoder": _open_simulated_encoder,
            "embedder": _open_simulated_embedder,
            "diffuser": _open_simulated_diffuser,
        },
    ),
    "trtllm": EngineKind(TrtllmConfig, _open_trtllm, {"encoder": _open_trtllm_encoder}, describe=_describe_trtllm),
    "vllm": EngineKind(VllmConfig, _open_vllm, {"encoder": _open_vllm_encoder}, describe=_describe_arguments),
}
