"""An engine from outside of Baton: it repeats the prompt, and takes no handoffs.

python -m services decode.yaml "engine={kind: echo}", once the entry point of docs/extending.md is installed.
"""

from collections.abc import AsyncGenerator
from typing import Literal

from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.base import Engine, EngineLoad, ModelFacts
from services.engines.context import EngineConfig
from services.engines.kv import KvLayout, PulledKv
from services.engines.prompt import Prompt, Sampling
from services.engines.registry import EngineKind

LAYOUT = KvLayout("echo", "float32", 1, 1, 1, block_tokens=16, head_dim=1, block_bytes=64)


class EchoConfig(EngineConfig):
    kind: Literal["echo"] = "echo"
    name: str = "echo"


class EchoEngine(Engine):
    def __init__(self, config: EchoConfig) -> None:
        self._facts = ModelFacts(config.name, "echo", 4096, 256, LAYOUT, takes_handoffs=False)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        assert isinstance(source, Prompt)  # KV is never pulled for an engine without a pool.
        yield Tokens(source.token_ids[: sampling.max_tokens])
        yield Finished(FinishReason.LENGTH, len(source.token_ids))


KIND = EngineKind(EchoConfig, open_engine=lambda config, context: EchoEngine(config))
