"""Bodies with a wrong value at each place: few errors are made, since each holds the interpreter for a while."""

import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel
from support.calibration import here

from baton.errors import InvalidRequest
from router.anthropic.messages import MessagesRequest
from router.openai.chat import ChatCompletionRequest
from router.openai.completions import CompletionRequest
from router.openai.embeddings import EmbeddingsRequest
from router.openai.fields import read
from router.openai.responses import ResponsesRequest

MANY: dict[str, tuple[type[BaseModel], dict[str, Any], str]] = {
    "blocks": (
        MessagesRequest,
        {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": [1] * 60_000}]},
        "messages[0].content[0]",
    ),
    "tools": (MessagesRequest, {"model": "demo", "max_tokens": 1, "messages": [], "tools": [1] * 60_000}, "tools[0]"),
    "turns": (ChatCompletionRequest, {"messages": [1] * 60_000}, "messages[0]"),
    "ids": (CompletionRequest, {"prompt": [1.5] * 60_000}, "prompt[0]"),
    "fields": (ChatCompletionRequest, {"messages": [], **{f"x{at}": 1 for at in range(30_000)}}, "body"),
    "fields of a tool": (
        ChatCompletionRequest,
        {"messages": [], "tools": [{"type": "function", "function": {f"x{at}": 1 for at in range(30_000)}}]},
        "tools[0].function",
    ),
}
TEXT, TURN = {"type": "text", "text": "x"}, {"role": "user", "content": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}
LARGE: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "blocks": (
        MessagesRequest,
        {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": [TEXT] * 50_000}]},
    ),
    "results": (
        MessagesRequest,
        {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": [RESULT] * 25_000}]},
    ),
    "turns": (ChatCompletionRequest, {"messages": [TURN] * 50_000}),
    "tools": (
        MessagesRequest,
        {"model": "demo", "max_tokens": 1, "messages": [], "tools": [{"name": "f", "input_schema": {}}] * 50_000},
    ),
    "items": (ResponsesRequest, {"input": [TURN] * 50_000}),
    "ids": (EmbeddingsRequest, {"input": [[1] * 100] * 50_000}),
    "biases": (ChatCompletionRequest, {"messages": [], "logit_bias": {str(at): "a" for at in range(60_000)}}),
}


@pytest.mark.parametrize("name", MANY)
def test_many_wrong_values_are_refused_by_the_first_in_little_time(name: str) -> None:
    kind, body, field = MANY[name]
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        with pytest.raises(InvalidRequest) as refused:
            read(kind, body)
        seconds.append(time.thread_time() - began)
    assert refused.value.violations[0].field == field
    assert min(seconds) < here(0.03)


@pytest.mark.parametrize("name", LARGE)
def test_other_threads_run_while_a_large_body_is_read(name: str) -> None:
    kind, body = LARGE[name]
    assert max(_turns_of_another(kind, body) for _ in range(5)) >= 10


def _turns_of_another(kind: type[BaseModel], body: dict[str, Any]) -> int:
    """The number of times that this thread ran while another read a body; few where that one holds the interpreter."""

    def reads() -> None:
        with suppress(InvalidRequest):
            read(kind, body)

    reader = threading.Thread(target=reads)
    reader.start()
    turns = 0
    while reader.is_alive():
        time.sleep(0.0002)
        turns += 1
    return turns
