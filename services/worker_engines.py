"""What a worker computes with, by its roles: a language model, a model's eyes, or both in one process."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from discovery.registry import Registry
from services.chat_template import read_chat_template
from services.config import WorkerConfig
from services.embedding_pool import EmbeddingPool
from services.encode_only import EncodeOnly
from services.engine import Encoder, Engine, EngineLoad, ModelFacts
from services.engines.factory import open_encoder, open_engine
from services.engines.purpose import Purpose
from services.engines.trtllm.config import MAX_NODES, TrtllmConfig

_KIND_OF_NUMBER = "trtllm-node"


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encode role's part: the encoder, and the pool that large embeddings wait in."""

    encoder: Encoder
    pool: EmbeddingPool


@dataclass(frozen=True, slots=True)
class WorkerEngines:
    """`engine` serves prefill and decode, or stands in their place; `encoding` is there with the role encode."""

    engine: Engine
    encoding: Encoding | None
    chat_template: str = ""  # in the place of the model's own

    @property
    def healthy(self) -> bool:
        """Whether all of it is."""
        return self.engine.healthy and (self.encoding is None or self.encoding.encoder.healthy)

    @property
    def has_kv(self) -> bool:
        """Whether there is a KV pool; else `load` is about the embeddings'."""
        return not isinstance(self.engine, EncodeOnly)

    @property
    def load_seconds(self) -> float:
        """What loading took."""
        parts = [self.engine.facts.load_seconds]
        if self.encoding is not None and self.has_kv:
            parts.append(self.encoding.encoder.facts.load_seconds)
        return sum(parts)

    @property
    def facts(self) -> ModelFacts:
        """Of the model: the engine's, and what the encoder and the configuration add."""
        facts = self.engine.facts
        if self.chat_template:
            facts = replace(facts, files=replace(facts.files, chat_template=self.chat_template))
        return facts if self.encoding is None else replace(facts, images=self.encoding.encoder.facts.images)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """For the registry: `images` of a model that takes them."""
        return ("images",) if self.engine.facts.images else ()

    def load(self) -> EngineLoad:
        """The engine's; images that are encoded beside it count as requests."""
        load = self.engine.load()
        if self.encoding is None or not self.has_kv:
            return load
        images = self.encoding.encoder.load()
        return EngineLoad(
            running=load.running + images.running,
            waiting=load.waiting + images.waiting,
            waiting_prefill_tokens=load.waiting_prefill_tokens,
            blocks_total=load.blocks_total,
            blocks_used=load.blocks_used,
            blocks_held=load.blocks_held,
        )


@asynccontextmanager
async def open_engines(config: WorkerConfig, registry: Registry) -> AsyncIterator[WorkerEngines]:
    """Loads what the roles need, and nothing else. Raises ConfigError, and EngineFailed if it cannot be loaded."""
    template = read_chat_template(config.chat_template)
    async with AsyncExitStack() as stack:
        purpose = Purpose(config.roles, config.handoff.lease_seconds, log_level=config.log.level)
        encoding = None
        if "encode" in config.roles:
            encoding = await stack.enter_async_context(_open_encoding(config, purpose))
        if set(config.roles) == {"encode"}:
            assert encoding is not None
            yield WorkerEngines(EncodeOnly(encoding.encoder, encoding.pool), encoding, template)
            return
        if _needs_a_number(config):
            number = await stack.enter_async_context(registry.number(_KIND_OF_NUMBER, MAX_NODES))
            purpose = replace(purpose, node=lambda: number.value)
        yield WorkerEngines(await stack.enter_async_context(open_engine(config.engine, purpose)), encoding, template)


def _needs_a_number(config: WorkerConfig) -> bool:
    """Handoffs of TensorRT-LLM have ids of which a number of the worker is a part."""
    return isinstance(config.engine, TrtllmConfig) and config.engine.node_id is None and "prefill" in config.roles


@asynccontextmanager
async def _open_encoding(config: WorkerConfig, purpose: Purpose) -> AsyncIterator[Encoding]:
    async with open_encoder(config.engine, purpose) as encoder:
        with EmbeddingPool(encoder.facts.layout, config.encode.pool_bytes) as pool:
            yield Encoding(encoder, pool)
