"""/v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2
from router.openai.errors import FieldNames
from router.openai.fields import (
    ANY_OBJECT,
    Fields,
    SamplingFields,
    StructuralTags,
    Uint32,
    json_text,
    read,
    refuse,
)
from router.openai.messages import ChatMessage, Function, FunctionTool, add_messages, add_tools


class ToolName(Fields):
    """The name of a function."""

    name: Annotated[str, Field(min_length=1)]


class NamedTool(Fields):
    """A tool that must be called."""

    type: Literal["function"]
    function: ToolName


class FlatNamedTool(ToolName):
    """The same in /v1/responses, where the name is beside the type."""

    type: Literal["function"]


ToolMode: TypeAlias = Literal["none", "auto", "required"]


class PlainText(Fields):
    """No format."""

    type: Literal["text"]


class AnyObject(Fields):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Fields):
    """A schema. It is always followed, `strict` or not."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchema(Fields):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatJsonSchema(NamedSchema):
    """The same in /v1/responses, where the schema is beside the type."""

    type: Literal["json_schema"]


# By their types, and where one is another, by the field too.
_FORMATS: Mapping[tuple[str, str], type[PlainText | AnyObject | JsonSchema | NamedSchema | StructuralTags]] = {
    ("", "text"): PlainText,
    ("", "json_object"): AnyObject,
    ("", "json_schema"): JsonSchema,
    ("text.format", "json_schema"): FlatJsonSchema,
    ("", "structural_tag"): StructuralTags,
}


class ChatCompletionRequest(SamplingFields):
    """The body of a request."""

    messages: list[ChatMessage]
    max_tokens: Uint32 | None = None
    max_completion_tokens: Uint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None

    @property
    def names(self) -> FieldNames:
        """The fields of SamplingFields; `response_format` is a grammar by its own name."""
        guided = super().names.guided or format_field("response_format", self.response_format)
        most = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return FieldNames(guided, most, function="function.")

    def generate_request(self, request_id: str) -> generate_pb2.GenerateRequest:
        """The request to the pipeline. Raises Unsupported for what would have to be ignored."""
        made = self.request(request_id)
        made.chat.SetInParent()
        add_messages(made.chat, self.messages)
        functions = [tool.function for tool in self.tools or []]
        choice = self.tool_choice.function if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        offer_tools(made.chat, functions, choice, parallel=self.parallel_tool_calls, within="function.")
        if self.chat_template_kwargs:
            made.chat.template_variables.update(self.chat_template_kwargs)
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if most is not None:
            made.stopping.max_tokens = most
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest.of("top_logprobs", "has no effect unless logprobs is true")
        if self.logprobs:
            made.response.logprobs = self.top_logprobs or 0
        if self.stream and made.chat.tools:
            made.response.stream_tool_calls = True
        if self.separate_reasoning is False:
            made.response.raw_text = True
        guide(made, "response_format", self.response_format)
        return made


def offer_tools(
    chat: generate_pb2.ChatInput,
    functions: Sequence[Function],
    choice: ToolMode | ToolName | None,
    *,
    parallel: bool | None,
    within: str = "",
) -> None:
    """Adds the tools that may be called. Raises InvalidRequest; `within` is as in add_tools."""
    if choice != "none":
        add_tools(chat, functions, within)
    if chat.tools and parallel is False:
        chat.tool_choice.is_single = True
    if isinstance(choice, ToolName):
        chat.tool_choice.name = choice.name
    elif choice == "required":
        chat.tool_choice.is_required = True


def guide(request: generate_pb2.GenerateRequest, field: str, wanted: Mapping[str, Any] | None) -> None:
    """Sets the grammar that `response_format` asks for. Raises Unsupported for an unknown type, and InvalidRequest."""
    if wanted is None:
        return
    named = wanted.get("type")
    kind = _FORMATS.get((field, named)) or _FORMATS.get(("", named)) if isinstance(named, str) else None
    if kind is None:
        raise refuse(f"{field}.type", "expected text, json_object, json_schema or structural_tag")
    form = read(kind, wanted, field)
    if not isinstance(form, PlainText) and request.HasField("guided"):
        raise InvalidRequest.of(field, "cannot be combined with structured_outputs")
    match form:
        case AnyObject():
            request.guided.json_schema = ANY_OBJECT
        case JsonSchema():
            request.guided.json_schema = json_text(form.json_schema.json_schema, f"{field}.json_schema.schema")
        case NamedSchema():
            request.guided.json_schema = json_text(form.json_schema, f"{field}.schema")
        case StructuralTags():
            form.set_in(request, field)


def format_field(field: str, wanted: dict[str, Any] | None) -> str:
    """The path of the schema within `response_format`, for errors; empty if there is none."""
    match wanted:
        case None | {"type": "text"}:
            return ""
        case {"type": "json_schema", "json_schema": _}:
            return f"{field}.json_schema.schema"
        case {"type": "json_schema"}:
            return f"{field}.schema"
    return field
