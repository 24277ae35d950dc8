"""Which engine a configuration asks for. Imports no more than that engine needs."""

from contextlib import AbstractAsyncContextManager

from services.engine import Encoder, Engine
from services.engines.purpose import Purpose
from services.engines.pytorch.config import PyTorchConfig
from services.engines.simulated_config import SimulatedConfig
from services.engines.trtllm.config import TrtllmConfig

AnyConfig = PyTorchConfig | SimulatedConfig | TrtllmConfig


def open_engine(config: AnyConfig, purpose: Purpose) -> AbstractAsyncContextManager[Engine]:
    """The engine, to be entered: entering loads it. Raises ConfigError if it cannot be what it is to be."""
    match config:
        case PyTorchConfig():
            from services.engines.pytorch.engine import PyTorchEngine

            return PyTorchEngine(config)
        case SimulatedConfig():
            from services.engines.simulated import SimulatedEngine

            return SimulatedEngine(config)
        case TrtllmConfig():
            from services.engines.trtllm.opening import open_trtllm

            return open_trtllm(config, purpose)


def open_encoder(config: AnyConfig, purpose: Purpose) -> AbstractAsyncContextManager[Encoder]:
    """The engine's encode role, to be entered: entering loads it. Raises ConfigError where it has none."""
    match config:
        case PyTorchConfig():
            from services.engines.pytorch.encoder import PyTorchEncoder

            return PyTorchEncoder(config)
        case SimulatedConfig():
            from services.engines.simulated_encoder import SimulatedEncoder

            return SimulatedEncoder(config)
        case TrtllmConfig():
            from services.engines.trtllm.opening import open_trtllm_encoder

            return open_trtllm_encoder(config, purpose)


def describe(config: AnyConfig) -> list[str]:
    """For `--print-config`: what an engine's settings come to, where that is more than the settings themselves."""
    match config:
        case TrtllmConfig():
            from services.engines.trtllm.effective import resolve

            return [f"trtllm {line}" for line in resolve(config).describe()]
        case _:
            return []
