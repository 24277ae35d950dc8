"""From a configuration to an engine: the package is imported, and every guard asked, before anything is loaded."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import structlog

from rpc.errors import ConfigError
from services.engine import Encoder, Engine
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.effective import Effective
from services.engines.trtllm.encoder import TrtllmEncoder
from services.engines.trtllm.engine import TrtllmEngine
from services.engines.trtllm.guards import Surroundings, check
from services.engines.trtllm.machine import visible_gpus
from services.engines.trtllm.package import open_package

log = structlog.get_logger(__name__)


def open_trtllm(
    config: TrtllmConfig, roles: Sequence[str], lease_seconds: float
) -> AbstractAsyncContextManager[Engine]:
    """The engine for these roles, to be entered. Raises ConfigError without TensorRT-LLM, or for a wrong setting."""
    package = open_package(config.backend)
    effective = _checked(config, Surroundings(roles, package.version, visible_gpus(), lease_seconds))
    if "prefill" in roles and "disagg_request_id" in package.handoff_fields and config.node_id is None:
        raise ConfigError("engine.node_id: is unset; prefill workers with equal ids would mix their KV up")
    return TrtllmEngine(config, effective, package)


def open_trtllm_encoder(config: TrtllmConfig) -> AbstractAsyncContextManager[Encoder]:
    """The encode role, to be entered. Raises as `open_trtllm`, and for a model without images that it could encode."""
    package = open_package()
    return TrtllmEncoder(config, _checked(config, Surroundings(("encode",), package.version, visible_gpus())), package)


def _checked(config: TrtllmConfig, surroundings: Surroundings) -> Effective:
    checked = check(config, surroundings)
    for warning in checked.warnings:
        log.warning("trtllm configuration", warning=warning)
    return checked.effective
