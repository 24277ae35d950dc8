"""An engine whose answer a test writes, with a chat template of its choice: for what the router makes of answers."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from typing import Literal

import pytest

from services.config import WorkerConfig
from services.engines import registry
from services.engines.answer import Finished, FinishReason, Tokens
from services.engines.base import Engine, EngineLoad, ModelFacts
from services.engines.context import EngineConfig
from services.engines.kv import KvLayout, PulledKv
from services.engines.prompt import Prompt, Sampling
from services.engines.registry import EngineKind
from services.engines.simulated.tokens import byte_vocabulary

# Renders tools as Qwen's template does, in short, and names what calls look like.
HERMES_TEMPLATE = """\
{%- if tools %}tools: {% for tool in tools %}{{ tool | tojson }} {% endfor %}<tool_call> {% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if message.tool_call_id %} (of {{ message.tool_call_id }}){% endif %}|{% endfor %}assistant: """
REASONING_TEMPLATE = HERMES_TEMPLATE.replace("assistant: ", "assistant: <think>\n{# </think> #}")


class WrittenConfig(EngineConfig):
    kind: Literal["written"] = "written"
    name: str = "demo"
    answer: str = ""
    script: tuple[str, ...] = ()  # an answer for each turn of the assistant, in the place of `answer`
    template: str = HERMES_TEMPLATE
    token_seconds: float = 0.0


class WrittenEngine(Engine):
    def __init__(self, config: WrittenConfig) -> None:
        layout = KvLayout(config.name, "float32", 1, 1, 1, block_tokens=16, head_dim=1, block_bytes=64)
        vocabulary = byte_vocabulary()
        files = replace(vocabulary.files, chat_template=config.template)
        end = vocabulary.eos_token_id
        self._token_seconds = config.token_seconds
        self._answers = [(*answer.encode(), end) for answer in config.script or (config.answer,)]
        self._facts = ModelFacts(
            config.name,
            "written",
            8192,
            vocabulary.size,
            layout,
            eos_token_ids=(end,),
            files=files,
            takes_handoffs=False,
        )

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def decode(self, source: Prompt | PulledKv, sampling: Sampling) -> AsyncGenerator[Tokens | Finished, None]:
        assert isinstance(source, Prompt)
        turns = bytes(one for one in source.token_ids if one < 256).count(b"|assistant: ")
        answer = self._answers[min(turns, len(self._answers)) - 1]
        for token_id in answer[: sampling.max_tokens]:
            if self._token_seconds:
                await asyncio.sleep(self._token_seconds)
            yield Tokens((token_id,))
        is_cut = sampling.max_tokens < len(answer)
        reason = FinishReason.LENGTH if is_cut else FinishReason.END_OF_SEQUENCE
        yield Finished(reason, len(source.token_ids))


KIND = EngineKind(WrittenConfig, open_engine=lambda config, context: WrittenEngine(config))


@contextmanager
def written_engines() -> Iterator[None]:
    """Makes the kind `written` known to workers in this process, as a distribution that brings an engine does."""
    found = EntryPoints([EntryPoint("written", "support.engines.written_engine:KIND", registry.ENTRY_POINTS)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", lambda group: found.select(group=group))
        yield


def writes(answer: str, template: str = HERMES_TEMPLATE, token_seconds: float = 0.0) -> WorkerConfig:
    """A worker that answers everything with one text."""
    return _worker(WrittenConfig(answer=answer, template=template, token_seconds=token_seconds))


def follows(script: Sequence[str]) -> WorkerConfig:
    """A worker that answers each turn of a conversation with the next text of a script."""
    return _worker(WrittenConfig(script=tuple(script)))


def _worker(engine: WrittenConfig) -> WorkerConfig:
    return WorkerConfig(worker_id="d1", roles=("decode",), engine=engine, drain_seconds=0)
