"""An engine of 8B shape with random weights, made in place; tiny where there is no GPU.

Importing this replaces the reading of weights, also in the processes of other ranks, which import the main module. With
BATON_BENCHMARK_NCCL=1 the ranks exchange everything by NCCL.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from benchmarks import gpu
from benchmarks.gpu_transfer import TINY
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.engine import PyTorchEngine
from services.engines.pytorch.model import attention, loading
from services.engines.pytorch.parallel import peer_ranks

VOCABULARY = 320 if TINY else gpu.VOCABULARY
CONTEXT = 96 if TINY else gpu.CONTEXT


def small_shape(layers: int = 3) -> LlamaConfig:
    """A shape whose float32 greedy ids can be compared: with random weights large enough to be decisive."""
    return LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        initializer_range=0.15,
        tie_word_embeddings=False,
        dtype="float32",
    )


def make_weights(_folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """In the place of reading them: random ones, the same on every rank."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    finally:
        torch.set_default_dtype(torch.float32)


loading._read_weights = make_weights

if os.environ.get("BATON_BENCHMARK_NCCL") == "1":
    # Only NCCL between ranks, to compare with.
    peer_ranks.PeerRanks.prepare = lambda _self, _shape: None  # type: ignore[method-assign]


@contextmanager
def folder_of(shape: LlamaConfig) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        yield Path(folder)


def big_shape(layers: int = 32) -> LlamaConfig:
    """That of an 8B Llama."""
    return small_shape() if TINY else gpu.shape(layers)


@asynccontextmanager
async def engine_of(shape: LlamaConfig, **options: object) -> AsyncIterator[PyTorchEngine]:
    """An engine of random weights, without a prefix cache, on the GPU if there is one."""
    with folder_of(shape) as folder:
        defaults: dict[str, object] = {"model": folder, "prefix_cache": False}
        if TINY:
            defaults |= {"kv_cache_bytes": 64 << 20, "threads": 1, "execution": "fused"}
        else:
            defaults |= {"device": "cuda", "gpu_memory_share": 0.75}
        async with PyTorchEngine(PyTorchConfig.model_validate({**defaults, **options})) as engine:
            yield engine
