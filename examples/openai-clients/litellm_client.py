"""LiteLLM's provider for servers of OpenAI's API, unchanged, against Baton."""

import json
from typing import Any

import litellm
from cases import KEY, MODEL, MOST_TOKENS, PROMPT, QUESTION, URL, Pet, called, pet, run, weather

SERVER: Any = {"api_base": URL, "api_key": KEY, "max_retries": 0}
CHAT: Any = {**SERVER, "model": f"openai/{MODEL}", "max_tokens": MOST_TOKENS, "temperature": 0}
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather in a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": FUNCTION}]


def plain() -> str:
    return litellm.completion(messages=MESSAGES, **CHAT).choices[0].message.content


def streamed() -> str:
    chunks = litellm.completion(messages=MESSAGES, stream=True, **CHAT)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def two_turns(*, stream: bool) -> str:
    """A call, its result, and the answer to it."""
    turns: Any = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(messages=turns, tools=TOOLS, tool_choice="required", stream=stream, **CHAT)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=turns)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    turns += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": weather(**arguments)}]
    second = litellm.completion(messages=turns, tools=TOOLS, **CHAT).choices[0].message
    return called(call.function.name, arguments["city"], second.content or "")


def tools() -> str:
    return two_turns(stream=False)


def tools_streamed() -> str:
    return two_turns(stream=True)


def structured() -> str:
    answer = litellm.completion(messages=MESSAGES, response_format=Pet, **CHAT)
    return pet(Pet.model_validate_json(answer.choices[0].message.content))


def responses() -> str:
    return litellm.responses(input=PROMPT, model=f"openai/{MODEL}", temperature=0, **SERVER).output_text


def embeddings() -> str:
    vectors = [one["embedding"] for one in litellm.embedding(input=["a", "b"], model=f"openai/{MODEL}", **SERVER).data]
    return f"{len(vectors)} vectors, the same length {len(set(map(len, vectors))) == 1}"


def error() -> str:
    try:
        return litellm.completion(messages=MESSAGES, **{**CHAT, "model": "openai/no-such-model"}).choices[0].message
    except litellm.NotFoundError as refused:
        return f"{type(refused).__name__} {refused.status_code}"


litellm.suppress_debug_info = True
run(plain, streamed, tools, tools_streamed, structured, responses, embeddings, error)
