"""From a configuration to an engine: the package is imported, and every guard asked, before anything is loaded."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

import structlog

from rpc.errors import ConfigError
from services.engine import Encoder, Engine
from services.engines.purpose import Purpose
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.effective import Effective
from services.engines.trtllm.encoder import TrtllmEncoder
from services.engines.trtllm.engine import TrtllmEngine
from services.engines.trtllm.guards import Surroundings, check
from services.engines.trtllm.machine import visible_gpus
from services.engines.trtllm.package import Package, open_package

log = structlog.get_logger(__name__)


def open_trtllm(config: TrtllmConfig, purpose: Purpose) -> AbstractAsyncContextManager[Engine]:
    """The engine for these roles, to be entered. Raises ConfigError without TensorRT-LLM, or for a wrong setting."""
    package = open_package(config.backend, purpose.log_level)
    surroundings = Surroundings(purpose.roles, package.version, visible_gpus(), purpose.lease_seconds)
    effective = _checked(config, surroundings)
    if (transceiver := effective.value.cache_transceiver_config) is not None:
        log.info(
            "trtllm handoffs",
            kv_transfer_timeout_ms=transceiver.kv_transfer_timeout_ms,
            handoff_deadline_seconds=config.handoff_deadline_seconds,
        )
    return TrtllmEngine(config, effective, package, replace(purpose, node=_node(config, purpose, package)))


def open_trtllm_encoder(config: TrtllmConfig, purpose: Purpose) -> AbstractAsyncContextManager[Encoder]:
    """The encode role, to be entered. Raises as `open_trtllm`, and for a model without images that it could encode."""
    package = open_package(log_level=purpose.log_level)
    surroundings = Surroundings(("encode",), package.version, visible_gpus())
    return TrtllmEncoder(config, _checked(config, surroundings), package)


def _node(config: TrtllmConfig, purpose: Purpose, package: Package) -> Callable[[], int]:
    """Which number this worker has. Two with one number would give out one id for the KV of two requests."""
    if config.node_id is not None:
        return partial(int, config.node_id)
    if purpose.node is None and "prefill" in purpose.roles and "disagg_request_id" in package.handoff_fields:
        raise ConfigError("engine.node_id: is unset; prefill workers with equal ids would mix their KV up")
    return purpose.node or int


def _checked(config: TrtllmConfig, surroundings: Surroundings) -> Effective:
    checked = check(config, surroundings)
    for warning in checked.warnings:
        log.warning("trtllm configuration", warning=warning)
    return checked.effective
