"""The body of /v1/messages, and of its count of tokens.

Tools of Anthropic's API: functions of the client's own, and the choice of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2, tokenize_pb2
from router.anthropic.content import Block, CacheControl, CacheMarks, Conversation, InputTurn, TextBlock
from router.anthropic.errors import THREAD
from router.openai.fields import Fields, Number, OnlyFalse, Uint32, json_text, refuse


class ClientTool(Block):
    """A tool that the client runs. The last fields say how others run tools, or see them later: nothing here does."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None
    defer_loading: OnlyFalse | None = None


class AutoChoice(Fields):
    """The model chooses."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyChoice(Fields):
    """One of the tools must be called."""

    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(Fields):
    """This tool must be called."""

    type: Literal["tool"]
    name: Annotated[str, Field(min_length=1)]
    disable_parallel_tool_use: bool = False


class NoChoice(Fields):
    """None may be called."""

    type: Literal["none"]


ToolChoice: TypeAlias = Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")]


def offer_tools(chat: generate_pb2.ChatInput, tools: Sequence[ClientTool], choice: ToolChoice | None) -> None:
    """Adds the tools that may be called. Raises InvalidRequest."""
    if isinstance(choice, NoChoice):
        return
    for index, tool in enumerate(tools):
        schema = json_text(tool.input_schema, f"tools[{index}].input_schema")
        chat.tools.add(
            name=tool.name, description=tool.description or "", parameters=schema, is_strict=bool(tool.strict)
        )
    match choice:
        case AnyChoice():
            chat.tool_choice.is_required = True
        case NamedChoice():
            chat.tool_choice.name = choice.name
    if choice is not None and choice.disable_parallel_tool_use and chat.tools:
        chat.tool_choice.is_single = True


_LEAST_BUDGET = 1024
# Templates know three efforts.
_EFFORTS: Mapping[str, str] = {"xhigh": "high", "max": "high"}


class Thinks(Fields):
    """The model reasons before it answers. The budget is checked, and bounds nothing but what max_tokens does."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=_LEAST_BUDGET)]
    display: Literal["summarized"] | None = None  # reasoning is shown as it is, never a summary of it


class ThinksIfNeeded(Fields):
    """The model may reason before it answers."""

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None


class ThinksNot(Fields):
    """The model answers at once, if its template can say so."""

    type: Literal["disabled"]


Thinking: TypeAlias = Annotated[Thinks | ThinksIfNeeded | ThinksNot, Field(discriminator="type")]


class OutputFormat(Fields):
    """A JSON Schema that the answer follows."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Fields):
    """Changes nothing."""

    user_id: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to the pipeline, and the places in the body of its turns and parts, for errors."""

    request: generate_pb2.GenerateRequest
    places: Mapping[str, str]


class PromptFields(Fields):
    """The fields that make a prompt."""

    model: str = Field(max_length=1024)
    messages: list[InputTurn]
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    thread: dict[str, Any] | None = None

    def set_prompt(self, made: generate_pb2.GenerateRequest) -> Conversation:
        """Sets the conversation, and the part of it to retain. Raises InvalidRequest and Unsupported."""
        made.chat.SetInParent()
        if self.thread is not None:
            raise refuse(THREAD, "no conversation is held here; send all of it")
        if not self.messages:
            raise InvalidRequest.of("messages", "is empty")
        offer_tools(made.chat, self.tools or [], self.tool_choice)
        marks = CacheMarks()
        for index, tool in enumerate(self.tools or []):
            marks.add(f"tools[{index}]", tool.cache_control, made.chat)
        conversation = Conversation(made.chat, marks)
        if self.system:
            conversation.add_system(self.system)
        for index, message in enumerate(self.messages):
            conversation.add(index, message)
        conversation.set_reasoning()
        marks.add("", self.cache_control, made.chat)
        if self.messages[-1].role == "assistant":
            raise refuse(f"messages[{len(self.messages) - 1}].role", "an answer that is begun cannot be continued")
        self._set_variables(made.chat)
        marks.set_in(made)
        return conversation

    def _set_variables(self, chat: generate_pb2.ChatInput) -> None:
        """Variables of chat templates that know them: Qwen's, gpt-oss's."""
        if self.thinking is not None:
            chat.template_variables["enable_thinking"] = not isinstance(self.thinking, ThinksNot)
        if self.output_config is not None and (effort := self.output_config.effort):
            chat.template_variables["reasoning_effort"] = _EFFORTS.get(effort, effort)


class MessagesRequest(PromptFields):
    """The body of a request."""

    max_tokens: Annotated[Uint32, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Uint32 | None = None

    # They change nothing here.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def asked(self, request_id: str) -> Asked:
        """The request to the pipeline. Raises InvalidRequest, and Unsupported for what would have to be ignored."""
        made = generate_pb2.GenerateRequest(request_id=request_id, model=self.model)
        if isinstance(self.thinking, Thinks) and self.thinking.budget_tokens >= self.max_tokens:
            raise InvalidRequest.of("thinking.budget_tokens", "must be less than max_tokens")
        conversation = self.set_prompt(made)
        made.response.stream_tool_calls = bool(self.stream and made.chat.tools)
        made.stopping.max_tokens = self.max_tokens
        made.stopping.stop.extend(self.stop_sequences or [])
        for name in ("temperature", "top_p", "top_k"):
            if (value := getattr(self, name)) is not None:
                setattr(made.sampling, name, value)
        if self.output_config is not None and self.output_config.format is not None:
            schema = json_text(self.output_config.format.json_schema, "output_config.format.schema")
            made.guided.json_schema = schema
        return Asked(made, conversation.places)


@dataclass(frozen=True, slots=True)
class Counted:
    """A prompt whose tokens are to be counted, and the places of its turns, as in Asked."""

    request: tokenize_pb2.TokenizeRequest
    prompt: generate_pb2.GenerateRequest
    places: Mapping[str, str]


class CountTokensRequest(PromptFields):
    """The body of a count of tokens."""

    def counted(self, request_id: str) -> Counted:
        """The prompt. Raises as `asked`."""
        made = generate_pb2.GenerateRequest(request_id=request_id, model=self.model)
        conversation = self.set_prompt(made)
        return Counted(tokenize_pb2.TokenizeRequest(model=self.model, chat=made.chat), made, conversation.places)
