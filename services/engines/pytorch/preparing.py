"""The part of a start that needs no GPU and no thread: modules, and digests of Triton's own code and of our kernels."""

from importlib import import_module
from importlib.util import find_spec

from services.engines.pytorch.config import PyTorchConfig

_KERNELS = ("triton_ops", "triton_kernels", "chunk_kernels", "digest_kernels")


def prepare(config: PyTorchConfig) -> None:
    """Imports what opening the engine does, and computes what is the same in each process. See EngineKind."""
    import_module("services.engines.pytorch.engine")
    import_module("numpy.random")
    if config.execution == "library" or (config.execution == "auto" and config.device == "cpu"):
        import_module("services.engines.pytorch.model.attention")  # with transformers' modules of models
    if config.device != "cpu" and find_spec("triton") is not None:
        _prepare_kernels()


def _prepare_kernels() -> None:
    from triton.runtime.jit import JITFunction

    # Names of compiled kernels contain both digests. Triton's library alone has 400 MB, which each process would read.
    _triton_key()
    for name in _KERNELS:
        module = import_module(f"services.engines.pytorch.kernels.{name}")
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                _ = kernel.cache_key


def _triton_key() -> str:
    """Returns the digest of Triton's code, which it remembers."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # before Triton 3.5
        from triton.compiler.compiler import triton_key
    key: str = triton_key()
    return key
