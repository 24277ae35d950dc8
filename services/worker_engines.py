"""The engines of a worker, by its roles: a language model, a vision encoder, an embedder, or several in one process."""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import ConfigError
from discovery.pairing import WHOLE_REQUESTS
from discovery.record import (
    ALLOCATES_FIRST,
    BAD_WORDS,
    DIGESTS_HANDOFFS,
    EARLY_HANDOFF,
    LORA,
    MOVES_DECODES,
    PREFIX_LOANS,
)
from discovery.registry import Registry
from engine_protocol.roles import LANGUAGE_MODEL, role_kinds, with_kv
from services.config import WorkerConfig
from services.engines.base import Encoder, Engine, EngineLoad, EnginePart, ModelFacts
from services.engines.context import EngineContext, KeptMemory
from services.engines.journal.journal import Journal
from services.engines.kv_transfer import AllocatesFirst
from services.engines.memory.allocation import AllocationRules
from services.engines.registry import open_engine, open_part
from services.keeper.client import KeeperClient
from services.multimodal.embedding_pull import EmbeddingPool
from services.sleeping.sleeper import Sleeper

_ENCODER = "encoder"
# Chat templates mark with these tags which text a model is trained on; they render to nothing.
_TRAINING_TAGS = re.compile(r"{%-?\s*(end)?generation\s*-?%}")


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encode role: the encoder, and the pool of the large embeddings that are leased to other workers."""

    encoder: Encoder
    pool: EmbeddingPool


@dataclass(frozen=True, slots=True)
class WorkerEngines:
    """`engine` serves the roles with KV, `encoding` encode, and parts other roles. At least one of them is there."""

    engine: Engine | None
    encoding: Encoding | None
    chat_template: str = ""  # replaces the model's own
    parts: Mapping[str, EnginePart] = field(default_factory=dict)
    sleeper: Sleeper | None = None  # of an engine that shares memory with those of other workers

    def part(self, name: str) -> Any:
        """The part of the engine that serves a role, such as `embedder`; None if no role of the worker needs it."""
        return self.parts.get(name)

    @property
    def healthy(self) -> bool:
        """True if all engines are healthy."""
        return all(one.healthy for one in self._all)

    @property
    def responsive(self) -> bool:
        """True if all engines answer as quickly as usual."""
        return all(one.responsive for one in self._all)

    @property
    def load_seconds(self) -> float:
        """The seconds that loading took."""
        return sum(facts.load_seconds for facts in self._all_facts)

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model, with the encoder's rules for images and the configured chat template."""
        facts = self._all_facts[0]
        if self.chat_template:
            facts = replace(facts, files=replace(facts.files, chat_template=self.chat_template))
        for part in self.parts.values():
            if part.facts.embedding is not None:
                facts = replace(facts, embedding=part.facts.embedding)
            if part.facts.drawing is not None:
                facts = replace(facts, drawing=part.facts.drawing)
        return facts if self.encoding is None else replace(facts, images=self.encoding.encoder.facts.images)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """For the registry: `images` if the model takes images, `whole_requests` if no KV can be handed to it, `lora`
        if it serves adapters, `allocates_first` if its engine allocates before a prompt is computed elsewhere,
        `early_handoff` if its engine hands over while it computes, `moves_decodes` if it does while it decodes,
        `bad_words` if its engine has them, `prefix_loans` if it lends blocks of its prefix cache, `digests_handoffs` if
        its blocks are in memory that it can read.
        """
        facts = self._all_facts[0]
        transfer = self.engine.kv_transfer if self.engine else None
        able = {
            "images": facts.images is not None,
            WHOLE_REQUESTS: not facts.takes_handoffs,
            LORA: facts.lora,
            ALLOCATES_FIRST: isinstance(transfer, AllocatesFirst),
            EARLY_HANDOFF: self.engine is not None and self.engine.progress is not None,
            MOVES_DECODES: self.engine is not None and self.engine.moves_decodes,
            PREFIX_LOANS: self.engine is not None and self.engine.prefixes is not None,
            DIGESTS_HANDOFFS: self.engine is not None and self.engine.memory is not None,
            BAD_WORDS: self.engine is not None and "bad_words" not in facts.unsupported_sampling,
        }
        if self.sleeper is not None:
            # What others held of a worker, or waited for, would keep it from sleeping, and them from waking.
            able |= {WHOLE_REQUESTS: True} | dict.fromkeys([EARLY_HANDOFF, MOVES_DECODES, PREFIX_LOANS], False)
        return tuple(name for name, is_able in able.items() if is_able)

    @property
    def journal(self) -> Journal | None:
        """The journal by which decodes outlive this process; None if they do not."""
        return self.engine.journal if self.engine is not None else None

    def load(self) -> EngineLoad:
        """The engine's load; images and calls of parts count as requests. Without it, blocks are of embeddings."""
        load = EngineLoad()
        if self.engine is not None:
            load = self.engine.load()
            load = self.sleeper.added_to(load) if self.sleeper is not None else load
        elif self.encoding is not None:
            pool = self.encoding.pool
            load = EngineLoad(blocks_total=pool.total, blocks_used=pool.used, blocks_held=pool.used)
        loads = [part.load() for part in self._all_parts]
        running, waiting = sum(one.running for one in loads), sum(one.waiting for one in loads)
        return replace(load, running=load.running + running, waiting=load.waiting + waiting)

    @property
    def _all_parts(self) -> list[EnginePart]:
        return [*([self.encoding.encoder] if self.encoding else []), *self.parts.values()]

    @property
    def _all(self) -> list[Engine | EnginePart]:
        return [*([self.engine] if self.engine is not None else []), *self._all_parts]

    @property
    def _all_facts(self) -> list[ModelFacts]:
        return [one.facts for one in self._all]


@asynccontextmanager
async def open_engines(
    config: WorkerConfig, registry: Registry, keeper: KeeperClient | None = None
) -> AsyncIterator[WorkerEngines]:
    """Loads the engines that the roles need; `keeper` holds what outlives them.

    Raises ConfigError, and EngineFailed if one cannot be loaded.
    """
    template = read_chat_template(config.chat_template)
    async with AsyncExitStack() as stack:
        context = EngineContext(
            config.roles,
            config.handoff.lease_seconds,
            allocation=_allocation(config),
            log_level=config.log.level,
            kept=_kept_memory(config, keeper),
        )
        needed = dict.fromkeys(role_kinds()[role].engine for role in config.roles)
        encoding = None
        if _ENCODER in needed:
            encoding = await stack.enter_async_context(_open_encoding(config, context))
        parts: dict[str, EnginePart] = {}
        for name in [name for name in needed if name not in (_ENCODER, LANGUAGE_MODEL)]:
            parts[name] = await stack.enter_async_context(open_part(name, config.engine, context))
        if LANGUAGE_MODEL not in needed:
            yield WorkerEngines(None, encoding, template, parts)
            return
        if most := config.engine.max_node_ids(config.roles):
            number = await stack.enter_async_context(registry.allocate_id(f"{config.engine.kind}-node", most))
            context = replace(context, node=lambda: number.value)
        engine = await stack.enter_async_context(open_engine(config.engine, context))
        yield WorkerEngines(engine, encoding, template, parts)


def _kept_memory(config: WorkerConfig, keeper: KeeperClient | None) -> KeptMemory | None:
    wanted = config.keep_memory
    return KeptMemory(keeper, wanted.weights, wanted.kv, wanted.standby) if keeper else None


def read_chat_template(path: Path | None) -> str:
    """Returns the template's text, empty without a path.

    Raises ConfigError naming the key if the file cannot be read, is empty, or is not valid Jinja.
    """
    if path is None:
        return ""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {path} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(f"chat_template: {path} is empty")
    try:
        # Routers parse it in the same way, but report an error only when a chat request comes.
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(_TRAINING_TAGS.sub("", text))
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template: {path}, line {error.lineno}: {error.message}") from error
    return text


def _allocation(config: WorkerConfig) -> AllocationRules:
    """A worker that does not decode may hold KV in its whole pool."""
    shares = set(config.roles) >= with_kv()
    return AllocationRules(config.handoff.held_share if shares else 1.0, config.handoff.held_wait_seconds)


@asynccontextmanager
async def _open_encoding(config: WorkerConfig, context: EngineContext) -> AsyncIterator[Encoding]:
    async with open_part(_ENCODER, config.engine, context) as encoder:
        with EmbeddingPool(encoder.facts.layout, config.encode.pool_bytes) as pool:
            yield Encoding(encoder, pool)
