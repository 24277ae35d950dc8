"""The parts that the requests of an engine share: model, block pool with its memory and tiers, and runner."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from baton.errors import ConfigError
from services.engines.context import KeptMemory
from services.engines.journal.journal import FoundDecode, Journal
from services.engines.journal.slots import SlotShape
from services.engines.kv import KvLayout
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.kv_cache.blocks import BlockPool
from services.engines.pytorch.kv_cache.events import CacheListener
from services.engines.pytorch.kv_cache.kept_cache import KeptCache, KeptPool, KeptShape, form_of
from services.engines.pytorch.kv_cache.memory import DeviceMemory, HostMemory, open_memory
from services.engines.pytorch.kv_cache.memory_plan import STANDBY_BYTES
from services.engines.pytorch.kv_cache.pool_size import layout_of, num_blocks, step_tokens
from services.engines.pytorch.kv_cache.tiers.tiers import KvTiers
from services.engines.pytorch.lora.layers import LoraLayers
from services.engines.pytorch.model.kept_weights import load_kept
from services.engines.pytorch.model.loading import LoadedModel, load_model
from services.engines.pytorch.parallel.followers import Followers
from services.engines.pytorch.parallel.shards import WHOLE, part_of_pool
from services.engines.pytorch.runners.fused_runner import Sizes
from services.engines.pytorch.runners.runner import StepRunner
from services.engines.pytorch.runners.selection import fused_runner, open_runner, why_not_fused
from services.engines.pytorch.steps.scheduler import SchedulerLimits
from services.engines.running import metrics

# A slot of the journal is a decode's until its answer has been kept for its grace.
_SLOTS_PER_SEQUENCE = 4
# Beside those for all ids: drafts may take some more.
_DRAFT_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Recovered:
    """The remains of an earlier process: hashes of blocks in the prefix cache, and decodes that own their blocks."""

    hashes: Sequence[bytes] = ()
    decodes: Sequence[FoundDecode] = ()
    journal: Journal | None = None  # for the decodes of this process


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Loaded, and ready for steps. Without `close`, threads, memory and files of the tiers stay open."""

    model: LoadedModel
    lora: LoraLayers | None
    layout: KvLayout
    limits: SchedulerLimits
    memory: HostMemory | DeviceMemory
    pool: BlockPool
    tiers: KvTiers | None
    followers: Followers | None
    runner: StepRunner
    recovered: Recovered
    eos_token_ids: frozenset[int]

    def zero(self, blocks: list[int]) -> None:
        """Zeroes blocks, on all ranks."""
        if self.tiers is not None:
            self.tiers.settle(blocks)
        self.memory.tensor[blocks] = 0
        if self.followers is not None:
            self.followers.zero(blocks)

    def close(self) -> None:
        """Frees tiers and memory. Followers are their owner's."""
        if self.tiers is not None:
            self.tiers.close()
        self.memory.close()


def open_parts(
    config: PyTorchConfig,
    listener: CacheListener | None,
    followers: Followers | None,
    kept: KeptMemory | None = None,
) -> EngineParts:
    """Loads the model, and allocates everything; what was opened is closed again if the rest fails."""
    model = _load(config, followers, kept)
    lora = LoraLayers(model.module, config.lora.max_loaded, config.lora.max_rank) if config.lora else None
    layout = layout_of(config, model)
    if kept is not None and kept.keeper.start.is_successor:
        _rehearse(config, model, layout)
    kept_pool = KeptPool.find(kept.keeper, form_of(config, layout)) if kept is not None and kept.kv else None
    if kept is not None and kept.kv and followers is not None:
        followers.replace_earlier(kept.keeper)
    reserved = STANDBY_BYTES if kept is not None and kept.standby else 0
    blocks = kept_pool.num_blocks if kept_pool else num_blocks(config, model, layout, reserved)
    blocks = followers.least_blocks(blocks) if followers else blocks
    with ExitStack() as opened:
        limits = _limits(config, model, layout, blocks - 1)
        shape = _kept_shape(layout, blocks, limits)
        if kept is not None and kept.kv and kept_pool is None:
            kept_pool = KeptPool.create(kept.keeper, form_of(config, layout), shape, model.device)
        memory = open_memory(layout, blocks, model.device, kept_pool.pool if kept_pool else None)
        opened.callback(memory.close)
        pool = BlockPool(blocks, listener, config.retained_share)
        recovered = _recover(pool, memory, shape, kept_pool)
        tiers = _open_tiers(config, layout, memory.tensor, listener)
        if tiers is not None:
            opened.callback(tiers.close)
            pool.lower = tiers
        sizes = Sizes(
            limits.max_sequences,
            limits.max_context_tokens,
            limits.block_tokens,
            graphs=config.cuda_graphs,
            # A process that takes over from another one answers first.
            graphs_later=kept is not None and kept.keeper.start.starts > 0,
            graph_prompt_tokens=config.graph_prompt_tokens if followers is None else 0,
        )
        if followers is None:
            runner = open_runner(config, model, memory.tensor, layout, sizes, lora)
        else:
            runner = _open_split_runner(model, memory, sizes, followers)
        opened.pop_all()
    ids = frozenset(model.eos_token_ids)
    return EngineParts(model, lora, layout, limits, memory, pool, tiers, followers, runner, recovered, ids)


def _load(config: PyTorchConfig, followers: Followers | None, kept: KeptMemory | None) -> LoadedModel:
    if kept is None or not kept.weights:
        model = load_model(config, followers.shard if followers else WHOLE)
    else:
        model = load_kept(config, kept.keeper)
    if kept is not None and model.device.type == "cuda" and (obstacle := why_not_fused(config, model)):
        raise ConfigError(f"keep_memory: engine.execution: memory of a GPU is kept of fused models only: {obstacle}")
    return model


def _rehearse(config: PyTorchConfig, model: LoadedModel, layout: KvLayout) -> None:
    """Computes steps of all sizes, on a pool of its own: the kernels are then loaded before this process takes over."""
    if model.device.type != "cuda" or why_not_fused(config, model):
        return
    memory = open_memory(layout, 2, model.device)
    sizes = Sizes(config.max_sequences, model.shape.max_context_tokens, layout.block_tokens, graphs=False)
    fused_runner(model, memory.tensor, sizes).rehearse()
    torch.cuda.empty_cache()


def _kept_shape(layout: KvLayout, num_blocks: int, limits: SchedulerLimits) -> KeptShape:
    blocks = -(-limits.max_context_tokens // limits.block_tokens) + _DRAFT_BLOCKS
    slot = SlotShape(limits.max_context_tokens, blocks)
    return KeptShape(layout, num_blocks, slot, _SLOTS_PER_SEQUENCE * limits.max_sequences)


def _recover(pool: BlockPool, memory: HostMemory | DeviceMemory, shape: KeptShape, kept: KeptPool | None) -> Recovered:
    """Takes over what an earlier process has left, and records from now on."""
    if kept is None:
        return Recovered()
    journal = Journal(kept.journal, shape.slot, shape.num_slots)
    cache = KeptCache(kept.seals, memory, shape.layout)
    decodes: Sequence[FoundDecode] = ()
    if kept.is_found:
        decodes = journal.read(shape.layout.block_tokens, shape.num_blocks)
    else:
        journal.begin()
    contents = cache.recover(decodes) if kept.is_found else {}
    pool.adopt(contents)
    pool.claim([block for decode in decodes for block in decode.blocks])
    for decode in decodes:
        metrics.RECOVERED_DECODES.labels(decode.kv).inc()
    metrics.RECOVERED_DECODES.labels("damaged").inc(journal.damaged)
    pool.record_of_cache = cache
    return Recovered(tuple(contents.values()), decodes, journal)


def _open_tiers(
    config: PyTorchConfig, layout: KvLayout, pool: torch.Tensor, listener: CacheListener | None
) -> KvTiers | None:
    return None if config.tiers is None else KvTiers(config.tiers, layout, pool, listener or (lambda _: None))


def _limits(config: PyTorchConfig, model: LoadedModel, layout: KvLayout, pool_blocks: int) -> SchedulerLimits:
    max_context_tokens = min(model.shape.max_context_tokens, pool_blocks * layout.block_tokens)
    most_tokens = step_tokens(config, model.device.type)
    return SchedulerLimits.of(config, most_tokens, layout.block_tokens, max_context_tokens)


def _open_split_runner(
    model: LoadedModel, memory: HostMemory | DeviceMemory, sizes: Sizes, followers: Followers
) -> StepRunner:
    pool = memory.tensor
    ranks = followers.begin(len(pool), sizes, memory.file_descriptor, model.device)
    return fused_runner(model, part_of_pool(pool, model.shard), sizes, ranks, followers.send)
