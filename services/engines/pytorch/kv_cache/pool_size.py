"""The layout and the size of the block pool, and the tokens of a step, as configured or derived."""

from baton.errors import ConfigError
from services.engines.kv import KvLayout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kv_cache.memory import DTYPES
from services.engines.pytorch.kv_cache.memory_plan import plan_pool
from services.engines.pytorch.model import checkpoint
from services.engines.pytorch.model.loading import LoadedModel

_HOST_CACHE_BYTES = 256 << 20
_DEFAULT_BLOCK_TOKENS = {"cpu": 16, "cuda": 32}
_DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 4096}


def layout_of(config: PyTorchConfig, model: LoadedModel) -> KvLayout:
    """Returns the layout of the pool. Ranks either share one with all heads, or each has one with its own."""
    shape = model.shape
    kv_heads = shape.kv_heads * (model.shard.size if model.shard.shares_pool else 1)
    block_tokens = config.block_tokens or _DEFAULT_BLOCK_TOKENS[model.device.type]
    return KvLayout(
        model=checkpoint.fingerprint(config.model),
        dtype=next(name for name, dtype in DTYPES.items() if dtype == model.dtype),
        num_layers=shape.num_layers,
        kv_factor=2,
        kv_heads=kv_heads,
        block_tokens=block_tokens,
        head_dim=shape.head_dim,
        block_bytes=shape.num_layers * 2 * kv_heads * block_tokens * shape.head_dim * model.dtype.itemsize,
    )


def num_blocks(config: PyTorchConfig, model: LoadedModel, layout: KvLayout, reserved: int = 0) -> int:
    """Returns the number of blocks in the cache's memory, one of them for padding.

    `reserved` are the bytes of a GPU that are left for another process.
    """
    size = config.kv_cache_bytes or _HOST_CACHE_BYTES
    if config.kv_cache_bytes is None and model.device.type == "cuda":
        size = plan_pool(config, model, step_tokens(config, model.device.type), reserved)
    count = size // layout.block_bytes
    if count < 2:
        raise ConfigError(f"engine.kv_cache_bytes: {size} bytes are less than two blocks of {layout.block_bytes} bytes")
    return int(count)


def step_tokens(config: PyTorchConfig, device: str) -> int:
    """Returns the most tokens of a step."""
    return config.max_step_tokens or max(_DEFAULT_STEP_TOKENS[device], 2 * config.max_sequences)
