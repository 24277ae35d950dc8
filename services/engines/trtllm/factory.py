"""Opens the engine and the encoder: imports the package and checks the arguments before anything is loaded."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

import structlog

from baton.errors import ConfigError
from services.engines.base import Encoder, Engine
from services.engines.context import EngineContext
from services.engines.trtllm.config import EXPERIMENTAL, TrtllmConfig
from services.engines.trtllm.encoder import TrtllmEncoder
from services.engines.trtllm.engine import TrtllmEngine
from services.engines.trtllm.package import Package, open_package, visible_gpus
from services.engines.trtllm.resolved_args import Environment, ResolvedArgs, check

log = structlog.get_logger(__name__)


def open_trtllm(config: TrtllmConfig, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
    """Returns the engine for these roles; entering it loads it. Raises ConfigError without TensorRT-LLM, or for a wrong
    setting.
    """
    package = open_package(config.backend, context.log_level)
    environment = Environment(context.roles, package.version, visible_gpus(), context.lease_seconds)
    effective = _checked(config, environment)
    if (transceiver := effective.value.cache_transceiver_config) is not None:
        log.info(
            "trtllm handoffs",
            kv_transfer_timeout_ms=transceiver.kv_transfer_timeout_ms,
            handoff_deadline_seconds=config.handoff_deadline_seconds,
        )
    return TrtllmEngine(config, effective, package, replace(context, node=_node(config, context, package)))


def open_trtllm_encoder(config: TrtllmConfig, context: EngineContext) -> AbstractAsyncContextManager[Encoder]:
    """Returns the encoder; entering it loads it. Raises as `open_trtllm`, and for a model without images to encode."""
    package = open_package(log_level=context.log_level)
    environment = Environment(("encode",), package.version, visible_gpus())
    return TrtllmEncoder(config, _checked(config, environment), package)


def _node(config: TrtllmConfig, context: EngineContext, package: Package) -> Callable[[], int]:
    """Returns a function for this worker's number. Two workers with the same number would give the KV of two requests
    one id.
    """
    if config.node_id is not None:
        return partial(int, config.node_id)
    if context.node is None and "prefill" in context.roles and "disagg_request_id" in package.handoff_fields:
        raise ConfigError("engine.node_id: is unset; prefill workers with equal numbers would mix up their KV")
    return context.node or int


def _checked(config: TrtllmConfig, environment: Environment) -> ResolvedArgs:
    log.warning("trtllm engine is experimental", reason=EXPERIMENTAL, version=str(environment.version))
    checked = check(config, environment)
    for warning in checked.warnings:
        log.warning("trtllm configuration", warning=warning)
    return checked.effective
