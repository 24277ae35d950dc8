"""LangChain's ChatOpenAI and OpenAIEmbeddings, unchanged, against Baton."""

from cases import KEY, MODEL, MOST_TOKENS, PROMPT, QUESTION, URL, Pet, called, pet, run, weather
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import NotFoundError

WEATHER = tool(weather)


def chat(model: str = MODEL, *, responses: bool = False) -> ChatOpenAI:
    """A model, by /v1/chat/completions or by /v1/responses."""
    return ChatOpenAI(
        base_url=URL,
        api_key=KEY,
        model=model,
        max_retries=0,
        temperature=0,
        max_tokens=MOST_TOKENS,
        use_responses_api=responses,
    )


def plain() -> str:
    return chat().invoke(PROMPT).text


def streamed() -> str:
    return "".join(chunk.text for chunk in chat().stream(PROMPT))


def two_turns(llm: ChatOpenAI, *, stream: bool) -> str:
    """A call, its result, and the answer to it."""
    turns: list[BaseMessage] = [HumanMessage(QUESTION)]
    forced = llm.bind_tools([WEATHER], tool_choice="any", strict=True)
    answer: AIMessage | None = None
    if stream:
        for chunk in forced.stream(turns):
            answer = chunk if answer is None else answer + chunk
    else:
        answer = forced.invoke(turns)
    (call,) = answer.tool_calls
    turns += [answer, WEATHER.invoke(call)]
    return called(call["name"], call["args"]["city"], llm.bind_tools([WEATHER]).invoke(turns).text)


def tools() -> str:
    return two_turns(chat(), stream=False)


def tools_streamed() -> str:
    return two_turns(chat(), stream=True)


def structured() -> str:
    return pet(chat().with_structured_output(Pet, method="json_schema").invoke("A pet"))


def structured_by_a_tool() -> str:
    return pet(chat().with_structured_output(Pet, method="function_calling", strict=True).invoke("A pet"))


def responses() -> str:
    return chat(responses=True).invoke(PROMPT).text


def responses_streamed() -> str:
    return "".join(chunk.text for chunk in chat(responses=True).stream(PROMPT))


def responses_tools() -> str:
    return two_turns(chat(responses=True), stream=False)


def responses_tools_streamed() -> str:
    return two_turns(chat(responses=True), stream=True)


def embeddings() -> str:
    # Its tokens would be those of OpenAI's own tokenizer; as texts the model's own tokenizer reads them.
    embedder = OpenAIEmbeddings(base_url=URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    vectors = embedder.embed_documents(["one", "another"])
    return f"{len(vectors)} vectors, the same length {len(set(map(len, vectors))) == 1}"


def error() -> str:
    try:
        return chat("no-such-model").invoke(PROMPT).text
    except NotFoundError as refused:
        return f"{type(refused).__name__} {refused.code}"


run(
    plain,
    streamed,
    tools,
    tools_streamed,
    structured,
    structured_by_a_tool,
    responses,
    responses_streamed,
    responses_tools,
    responses_tools_streamed,
    embeddings,
    error,
)
