"""Which engine a configuration asks for. Imports no more than that engine needs."""

from contextlib import AbstractAsyncContextManager

from services.engine import Encoder, Engine
from services.engines.pytorch.config import PyTorchConfig
from services.engines.simulated_config import SimulatedConfig


def open_engine(config: PyTorchConfig | SimulatedConfig) -> AbstractAsyncContextManager[Engine]:
    """The engine, to be entered: entering loads it."""
    match config:
        case PyTorchConfig():
            from services.engines.pytorch.engine import PyTorchEngine

            return PyTorchEngine(config)
        case SimulatedConfig():
            from services.engines.simulated import SimulatedEngine

            return SimulatedEngine(config)


def open_encoder(config: PyTorchConfig | SimulatedConfig) -> AbstractAsyncContextManager[Encoder]:
    """The engine's encode role, to be entered: entering loads it."""
    match config:
        case PyTorchConfig():
            from services.engines.pytorch.encoder import PyTorchEncoder

            return PyTorchEncoder(config)
        case SimulatedConfig():
            from services.engines.simulated_encoder import SimulatedEncoder

            return SimulatedEncoder(config)
