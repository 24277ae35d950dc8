"""The TensorRT-LLM engine on the stand-in, with the sizes of support/engines/engine_calls.py."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
from fake_tensorrt_llm.installation import installed
from fake_tensorrt_llm.tables import TABLES
from support.engines.engine_calls import BLOCK_TOKENS, BLOCKS, CONTEXT_TOKENS, MAX_SEQUENCES, MAX_WAITING

from baton.errors import ConfigError
from services.engines.base import Engine
from services.engines.context import EngineContext
from services.engines.trtllm.config import TrtllmConfig
from services.engines.trtllm.factory import open_trtllm
from services.engines.trtllm.package import open_package

VERSIONS = tuple(TABLES)
MODEL_VARIABLE = "BATON_TRTLLM_MODEL"
TRANSFER_SECONDS = 1.0


@contextmanager
def trtllm(version: str) -> Iterator[None]:
    """Installs the stand-in in this version, with two GPUs."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    try:
        with installed(version):
            yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def settings(checkpoint: Path, args: Mapping[str, object] | None = None, **options: object) -> dict[str, object]:
    """The key `engine` of a worker."""
    transceiver = {
        "backend": "NIXL",
        "max_tokens_in_buffer": CONTEXT_TOKENS,
        "kv_transfer_timeout_ms": int(TRANSFER_SECONDS * 1000),
    }
    defaults = {
        "max_seq_len": CONTEXT_TOKENS,
        "max_batch_size": MAX_SEQUENCES,
        "kv_cache_config": {"tokens_per_block": BLOCK_TOKENS, "max_tokens": BLOCKS * BLOCK_TOKENS},
        "cache_transceiver_config": transceiver,
    }
    return {
        "kind": "trtllm",
        "model": str(checkpoint),
        "args": {**defaults, **(args or {})},
        "node_id": 1,
        "max_waiting": MAX_WAITING,
        "handoff_deadline_seconds": TRANSFER_SECONDS / 2,
        "abort_seconds": 0.3,
        **options,
    }


def open_engine(
    checkpoint: Path, args: Mapping[str, object] | None = None, **options: object
) -> AbstractAsyncContextManager[Engine]:
    """An engine for prefill and decode."""
    config = TrtllmConfig.model_validate(settings(checkpoint, args, **options))
    return open_trtllm(config, EngineContext())


def require_real() -> None:
    """Skips the test, with the reason, unless TensorRT-LLM is installed, can run here, and a model is configured."""
    try:
        open_package()
    except ConfigError as error:
        pytest.skip(error.message)
    if MODEL_VARIABLE not in os.environ:
        pytest.skip(f"{MODEL_VARIABLE} names no checkpoint")


@contextmanager
def real() -> Iterator[None]:
    """The real package, instead of `trtllm`."""
    require_real()
    yield


def open_real(_checkpoint: Path) -> AbstractAsyncContextManager[Engine]:
    """The same engine on the configured checkpoint: the tests' own ones are too small for its kernels."""
    return open_engine(Path(os.environ[MODEL_VARIABLE]))
