"""Conversations in the templates of model families have the same text as with Hugging Face's apply_chat_template."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from support.engines.small_tokenizers import byte_level_rust
from transformers import PreTrainedTokenizerFast

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, model_pb2
from router.openai.messages import ChatMessage, FunctionTool, add_messages, add_tools
from router.text import chat_input
from router.text.served_model import ServedModel
from router.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "chat_templates"
LIMITS = model_pb2.ModelLimits(max_context_tokens=8192)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": " Be <b>brief</b> & kind.\n"}
ASK = {"role": "user", "content": 'Say "hé" to 你 — now? '}
SAY = {"role": "assistant", "content": "\n hé\n"}
THINK = {"role": "assistant", "content": "Cold.", "reasoning_content": "It is\nwinter 'here'."}
WROTE_THOUGHTS = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}


def called(*identities: str) -> dict[str, Any]:
    """A turn with calls of a tool."""
    arguments = {"city": "Tromsø & <Oslo>", "days": [1, 2.5, None, True]}
    calls = [
        {"id": one, "type": "function", "function": {"name": "weather", "arguments": {**arguments}}}
        for one in identities
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


CALL, TWO_CALLS = called("abcdefghi"), called("abcdefghi", "jklmnopqr")
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"t": "-3 °C"}'}
SECOND_RESULT = {"role": "tool", "tool_call_id": "jklmnopqr", "content": "rain"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The "weather" <now> in a città',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "number"}}},
                "required": ["city"],
            },
        },
    }
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [ASK],
    "system": [SYSTEM, ASK],
    "turns": [SYSTEM, ASK, SAY, ASK, WROTE_THOUGHTS, ASK],
    "thoughts": [ASK, THINK, ASK],
    "call": [SYSTEM, ASK, CALL, RESULT],
    "call with thoughts": [ASK, {**CALL, "reasoning_content": "I must look."}, RESULT, SAY, ASK],
    "two calls": [ASK, TWO_CALLS, RESULT, SECOND_RESULT],
    "wrong order": [ASK, ASK, RESULT],
}
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "documents": [{"title": "Ä", "text": "<b>"}], "date_string": "1 May 2026"},
]


@cache
def served(template: str) -> ServedModel:
    tokenizer = Tokenizer(byte_level_rust().to_str().encode(), json.dumps(SPECIAL), template)
    return ServedModel("m", LIMITS, model_pb2.ModelCapabilities(), frozenset(), tokenizer)


@cache
def hugging_face() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level_rust(), **SPECIAL)


def rendered_here(template: str, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]) -> str | None:
    """The prompt of an OpenAI request; None if the template refuses it."""
    chat = generate_pb2.ChatInput()
    sent = deepcopy(messages)
    for call in (call for message in sent for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    add_messages(chat, [ChatMessage(**message) for message in sent])
    add_tools(chat, [FunctionTool(**tool).function for tool in tools], "function.")
    chat.template_variables.update(variables)
    try:
        return chat_input.encode(chat, served(template))[1]
    except InvalidRequest:
        return None


def rendered_there(template: str, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]) -> str | None:
    """The prompt by transformers; None if the template refuses it."""
    try:
        return cast(
            str,
            hugging_face().apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=template,
                add_generation_prompt=True,
                tokenize=False,
                **variables,
            ),
        )
    except Exception:  # of the template, of any class
        return None


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("family", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_the_prompt_is_that_of_hugging_face(family: str, tools: list[dict[str, Any]]) -> None:
    template = (FOLDER / f"{family}.jinja").read_text()
    compared = 0
    for name, messages in CONVERSATIONS.items():
        for variables in VARIABLES:
            expected = rendered_there(template, messages, tools, variables)
            assert rendered_here(template, messages, tools, variables) == expected, name
            compared += expected is not None
    assert compared >= 2 * 3
