"""Bodies with a wrong value at each place: few errors are made, since each holds the interpreter for a while."""

import time
from typing import Any

import pytest
from pydantic import BaseModel
from support.calibration import here

from baton.errors import InvalidRequest
from router.anthropic.messages import MessagesRequest
from router.openai.chat import ChatCompletionRequest
from router.openai.completions import CompletionRequest
from router.openai.fields import read

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
