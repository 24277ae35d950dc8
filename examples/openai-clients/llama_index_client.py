"""LlamaIndex's OpenAILike, for chats and for embeddings, unchanged, against Baton."""

from cases import KEY, MODEL, MOST_TOKENS, PROMPT, QUESTION, URL, Pet, called, pet, run, weather
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from openai import NotFoundError

WEATHER = FunctionTool.from_defaults(fn=weather)
USER = ChatMessage(role="user", content=PROMPT)


def chat(model: str = MODEL, *, has_tools: bool = True) -> OpenAILike:
    """A model, by /v1/chat/completions. Without tools a structured output is asked for by its schema."""
    return OpenAILike(
        api_base=URL,
        api_key=KEY,
        model=model,
        is_chat_model=True,
        is_function_calling_model=has_tools,
        should_use_structured_outputs=not has_tools,
        context_window=2048,
        max_tokens=MOST_TOKENS,
        temperature=0,
        max_retries=0,
    )


def plain() -> str:
    return str(chat().chat([USER]).message.content)


def streamed() -> str:
    return "".join(chunk.delta or "" for chunk in chat().stream_chat([USER]))


def two_turns(*, stream: bool) -> str:
    """A call, its result, and the answer to it."""
    llm, question = chat(), ChatMessage(role="user", content=QUESTION)
    if stream:
        *_, answer = llm.stream_chat_with_tools([WEATHER], chat_history=[question], tool_required=True)
    else:
        answer = llm.chat_with_tools([WEATHER], chat_history=[question], tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    result = ChatMessage(
        role="tool", content=weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id}
    )
    second = llm.chat_with_tools([WEATHER], chat_history=[question, answer.message, result])
    return called(call.tool_name, call.tool_kwargs["city"], second.message.content or "")


def tools() -> str:
    return two_turns(stream=False)


def tools_streamed() -> str:
    return two_turns(stream=True)


def structured() -> str:
    return pet(chat(has_tools=False).as_structured_llm(Pet).complete("A pet").raw)


def structured_by_a_tool() -> str:
    return pet(chat().as_structured_llm(Pet).complete("A pet").raw)


def embeddings() -> str:
    vectors = OpenAILikeEmbedding(api_base=URL, api_key=KEY, model_name=MODEL).get_text_embedding_batch(["a", "b"])
    return f"{len(vectors)} vectors, the same length {len(set(map(len, vectors))) == 1}"


def error() -> str:
    try:
        return str(chat("no-such-model").chat([USER]).message.content)
    except NotFoundError as refused:
        return f"{type(refused).__name__} {refused.code}"


run(plain, streamed, tools, tools_streamed, structured, structured_by_a_tool, embeddings, error)
