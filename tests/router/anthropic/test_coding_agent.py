"""A coding agent's session of 20 turns with tools, by the official package: it writes programs and runs them."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anthropic import AsyncAnthropic
from anthropic.types import Message
from support.clients.anthropic_api import anthropic_of
from support.clients.openai_api import openai_bench, tools_worker
from support.engines.written_engine import follows, written_engines

TOOLS: Any = [
    {
        "name": name,
        "description": description,
        "input_schema": {"type": "object", "properties": {one: {"type": "string"} for one in fields}},
    }
    for name, description, fields in (
        ("read", "Reads a file", ("path",)),
        ("write", "Writes a file", ("path", "text")),
        ("run", "Runs a program of the folder", ("path",)),
    )
]
SYSTEM: Any = [{"type": "text", "text": "You write programs.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]


def calls(*wanted: tuple[str, Mapping[str, str]], text: str = "") -> str:
    return text + "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>" for name, arguments in wanted
    )


def program(number: int) -> str:
    return f'import sys\n# attempt {number}: "quotes", </tool_call> and ünïcode\nprint(2 ** {number})\n'


def script() -> list[str]:
    """Nineteen turns with calls, two of them with several, and a last one without."""
    turns = [calls(("read", {"path": "missing.py"}), text="First I look.")]
    for number in range(9):
        path = f"power_{number}.py"
        turns.append(calls(("write", {"path": path, "text": program(number)}), text=f"Attempt {number}."))
        turns.append(calls(("run", {"path": path}), ("read", {"path": path})))
    return [*turns, 'Done: "it" prints 256.']


class Workshop:
    """The tools, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.used: list[str] = []
        self._tools: Mapping[str, Callable[..., str]] = {"read": self._read, "write": self._write, "run": self._run}

    def result(self, block: Any) -> dict[str, Any]:
        self.used.append(block.name)
        made = {"type": "tool_result", "tool_use_id": block.id}
        try:
            return {**made, "content": [{"type": "text", "text": self._tools[block.name](**block.input)}]}
        except OSError as error:
            return {**made, "content": type(error).__name__, "is_error": True}

    def _read(self, path: str) -> str:
        return (self._folder / path).read_text()

    def _write(self, path: str, text: str) -> str:
        (self._folder / path).write_text(text)
        return f"{len(text)} characters"

    def _run(self, path: str) -> str:
        return subprocess.run(
            [sys.executable, path], cwd=self._folder, capture_output=True, text=True, timeout=30, check=True
        ).stdout


async def work(client: AsyncAnthropic, workshop: Workshop) -> tuple[list[Message], list[Any]]:
    """Streams each turn, and sends back what it made, until one has no calls."""
    messages: list[Any] = [{"role": "user", "content": "Print a power of two."}]
    answers: list[Message] = []
    while True:
        async with client.messages.stream(
            model="demo", max_tokens=2000, system=SYSTEM, tools=TOOLS, messages=messages
        ) as stream:
            answer = await stream.get_final_message()
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return answers, messages
        results = [workshop.result(block) for block in answer.content if block.type == "tool_use"]
        results[-1]["cache_control"] = {"type": "ephemeral"}
        for turn in messages[:-1]:
            if turn["role"] == "user" and isinstance(turn["content"], list):
                turn["content"][-1].pop("cache_control", None)
        messages.append({"role": "user", "content": results})


async def test_a_session_of_twenty_turns_reaches_its_end(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    with written_engines():
        async with openai_bench(follows(script())) as running:
            answers, messages = await work(anthropic_of(running), workshop)
    assert len(answers) == 20
    assert (answers[-1].stop_reason, answers[-1].content[0].type) == ("end_turn", "text")
    assert workshop.used == ["read", *["write", "run", "read"] * 9]
    assert (tmp_path / "power_8.py").read_text() == program(8)
    outputs = [
        result["content"][0]["text"]
        for turn in messages
        if turn["role"] == "user" and isinstance(turn["content"], list)
        for result in turn["content"]
        if isinstance(result["content"], list)
    ]
    assert [text for text in outputs if text.strip().isdecimal()] == [f"{2**number}\n" for number in range(9)]
    assert messages[2]["content"][0]["is_error"] is True
    prompts = [answer.usage.input_tokens for answer in answers]
    assert prompts == sorted(set(prompts))


CHOICE: Any = {"type": "tool", "name": "pick"}
PICK: Any = {
    "name": "pick",
    "input_schema": {
        "type": "object",
        "properties": {"n": {"enum": ["a", "b"]}},
        "required": ["n"],
        "additionalProperties": False,
    },
}


async def test_each_turn_of_a_session_finds_the_turns_before_in_the_cache(tmp_path: Path) -> None:
    block, messages, usages = 16, [{"role": "user", "content": "Pick."}], []
    async with openai_bench(tools_worker(tmp_path, "prefill", "decode")) as running:
        create = anthropic_of(running).messages.create
        for _ in range(12):  # as many as fit into the context
            answer = await create(
                model="demo", max_tokens=120, messages=messages, tools=[PICK], tool_choice=CHOICE,  # type: ignore[arg-type]
                cache_control={"type": "ephemeral"}, extra_headers={"x-baton-session": "agent"},
            )  # fmt: skip
            usages.append(answer.usage)
            [call] = answer.content
            assert call.type == "tool_use"
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "ok"}
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]  # type: ignore[dict-item,list-item]
        lengths = [
            usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
            for usage in usages
        ]
    assert lengths == sorted(set(lengths))
    for before, usage in zip(lengths, usages[1:], strict=False):
        assert (usage.cache_read_input_tokens or 0) >= before // block * block
        assert usage.cache_creation_input_tokens
        assert usage.input_tokens < block
