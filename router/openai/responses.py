"""/v1/responses: texts and calls, whole or streamed. Those that are kept are in `stored`."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.errors import BatonError, InvalidRequest
from baton.inference.v1 import generate_pb2, sampling_pb2
from router.openai.call import HttpCall
from router.openai.chat import FlatNamedTool, ToolMode, format_field, guide, offer_tools
from router.openai.choices import EVENTS, cache_details, event
from router.openai.errors import FieldNames, describe
from router.openai.fields import CacheFields, Fields, Number, Uint32
from router.openai.messages import ChatMessage, FlatFunctionTool, InputItem, add_items, add_messages, turns_of
from router.stream.collector import UnaryCollector
from runtime.threads import let_others_run

ItemKind = Literal["message", "reasoning"]
_ITEM_PREFIXES: Mapping[str, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_SHOWN = b'"shown": null'
_SHOWN_FIELDS = ("instructions", "text", "tools", "metadata")
_PIECE = 16 * 1024  # of a text in JSON
_PART_TYPES: Mapping[ItemKind, str] = {"message": "output_text", "reasoning": "reasoning_text"}


class TextOptions(Fields):
    """`text`."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(CacheFields):
    """The body of a request."""

    model: str = Field(default="", max_length=1024)
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Uint32 | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    store: bool | None = None  # only if it is true, as the response says
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    parallel_tool_calls: bool | None = None
    tools: list[FlatFunctionTool] | None = None
    tool_choice: ToolMode | FlatNamedTool | None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    @property
    def uses_memory(self) -> bool:
        """True if the response goes on from a kept one, or is kept."""
        return self.is_kept or self.previous_response_id is not None

    def require_consistent(self) -> None:
        """Raises InvalidRequest for what contradicts itself."""
        if self.background and self.store is False:
            raise InvalidRequest.of("store", "is false, but a response in the background is kept")

    @property
    def is_kept(self) -> bool:
        """True if the response can be retrieved."""
        return bool(self.store or self.background)

    @property
    def names(self) -> FieldNames:
        """The names that the body has for fields of the request."""
        guided = format_field("text.format", self.text.format if self.text else None)
        items = () if isinstance(self.input, str) else turns_of(self.input)
        return FieldNames(guided, "max_output_tokens", before=bool(self.instructions), items=items)

    @cached_property
    def shown(self) -> bytes:
        """The fields that responses show as they were sent, as JSON: what is large of a response. Slow if they are."""
        fields = {
            "text": {"format": (self.text.format if self.text else None) or {"type": "text"}},
            "tools": [tool.model_dump() for tool in self.offered_tools],
            "metadata": self.metadata or {},
        }
        instructions = "null" if self.instructions is None else json_string(self.instructions)
        return f'"instructions": {instructions}, {json.dumps(fields)[1:-1]}'.encode()

    @property
    def offered_tools(self) -> list[FlatFunctionTool]:
        """The tools that may be called."""
        return [] if self.tool_choice == "none" else self.tools or []

    def generate_request(self, request_id: str) -> generate_pb2.GenerateRequest:
        """The request to the pipeline. Raises Unsupported for an unknown format."""
        _ = self.shown  # made here, in the thread that reads a large body
        made = generate_pb2.GenerateRequest(request_id=request_id, model=self.model)
        made.chat.SetInParent()
        if self.instructions:
            add_messages(made.chat, [ChatMessage(role="system", content=self.instructions)])
        if isinstance(self.input, str):
            add_messages(made.chat, [ChatMessage(role="user", content=self.input)])
        else:
            add_items(made.chat, self.input)
        offer_tools(made.chat, self.tools or [], self.tool_choice, parallel=self.parallel_tool_calls)
        for name in ("temperature", "top_p"):
            if getattr(self, name) is not None:
                setattr(made.sampling, name, getattr(self, name))
        if self.max_output_tokens is not None:
            made.stopping.max_tokens = self.max_output_tokens
        self.set_cache(made)
        guide(made, "text.format", self.text.format if self.text else None)
        return made


class ResponseBuilder:
    """Builds the object `response`, and the objects in it."""

    def __init__(self, request: ResponsesRequest, identity: str, created: int) -> None:
        # What is large: no response tells of the input, and the other fields are in what is shown.
        self._request = request.model_copy(update={"input": "", **dict.fromkeys(_SHOWN_FIELDS)})
        self.identity = identity
        self._created = created
        self.shown = request.shown
        self._has_tools = bool(request.offered_tools)
        choice = request.tool_choice or "auto"
        self._tool_choice = choice.model_dump() if isinstance(choice, FlatNamedTool) else choice

    @property
    def num_bytes(self) -> int:
        """The bytes of the request without its input, about."""
        return len(self.shown)

    @property
    def is_streamed(self) -> bool:
        """True if the response is sent as it comes."""
        return bool(self._request.stream)

    def response(
        self, model: str, status: str, output: list[dict[str, Any]], finished: generate_pb2.Finished | None = None
    ) -> dict[str, Any]:
        """The response in one of its states, with a place for what it shows of the request: see `with_shown`."""
        request = self._request
        is_cut = status == "incomplete"
        return {
            "id": self.identity,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "shown": None,
            "max_output_tokens": request.max_output_tokens,
            "model": model,
            "output": output,
            "parallel_tool_calls": self._has_tools and request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "store": request.is_kept,
            "temperature": request.temperature,
            "tool_choice": self._tool_choice if self._has_tools else "none",
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": _usage(finished.usage) if finished else None,
            **({"background": True} if request.background else {}),
        }

    def encoded(self, made: dict[str, Any]) -> bytes:
        """A response as JSON."""
        return with_shown(json.dumps(made).encode(), self.shown)

    def item(self, index: int, kind: ItemKind, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """An item of the output, at `index`: a message, or the reasoning before it."""
        made = {"id": self.item_id(index, kind), "type": kind, "status": status, "content": parts}
        return {**made, "role": "assistant"} if kind == "message" else {**made, "summary": []}

    def call(self, index: int, called: generate_pb2.ToolCall) -> dict[str, Any]:
        """A call of a tool, as an item of the output. It is complete: calls come as a whole."""
        return {
            "id": self.item_id(index, "function_call"),
            "type": "function_call",
            "status": "completed",
            "call_id": called.id,
            "name": called.name,
            "arguments": called.arguments,
        }

    def item_id(self, index: int, kind: str) -> str:
        """The identity of an item."""
        return f"{_ITEM_PREFIXES[kind]}{self.identity.removeprefix('resp_')}{f'_{index}' if index else ''}"

    def whole(self, collected: UnaryCollector) -> bytes:
        """The body of a response that is not streamed."""
        answer = collected.response
        status = status_of(answer.finished)
        calls = answer.token.tool_calls
        texts: list[tuple[ItemKind, str]] = []
        if answer.token.reasoning:
            texts.append(("reasoning", answer.token.reasoning))
        if answer.token.text or not calls:
            texts.append(("message", answer.token.text))
        items = [self.item(index, kind, status, [part(kind, text)]) for index, (kind, text) in enumerate(texts)]
        items += [self.call(index, called) for index, called in enumerate(calls, len(items))]
        return self.encoded(self.response(answer.started.model, status, items, answer.finished))


class ResponseStream:
    """Writes a response as the events of OpenAI's API."""

    def __init__(self, call: HttpCall, builder: ResponseBuilder) -> None:
        self._call = call
        self._builder = builder
        self._sequence = 0
        self._model = ""
        self._items: list[dict[str, Any]] = []
        self._kind: ItemKind | None = None  # of the item that has begun
        self._texts: list[str] = []

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Writes the next message of the pipeline."""
        match message.WhichOneof("event"):
            case "token":
                delta = message.token
                events = self._delta("reasoning", delta.reasoning) + self._delta("message", delta.text)
                for called in delta.tool_calls:
                    events += self._call_item(called)
                if events:
                    await self._call.write(events)
            case "started":
                await self._start(message.started)
            case "finished":
                await self._end(message.finished)

    async def fail(self, error: BatonError) -> None:
        """Ends the stream with an event that OpenAI's clients raise as an error."""
        described = describe(error, self._call.names)
        about = {name: value for name, value in described.items() if name != "type"}
        await self._call.end(self._event("error", {**about, "error": described}))

    async def _start(self, started: generate_pb2.Started) -> None:
        self._model = started.model
        response = self._builder.response(self._model, "in_progress", [])
        await self._call.begin(200, EVENTS)
        await self._call.write(
            self._event("response.created", {"response": response})
            + self._event("response.in_progress", {"response": response})
        )

    async def _end(self, finished: generate_pb2.Finished) -> None:
        status = status_of(finished)
        has_calls = any(item["type"] == "function_call" for item in self._items)
        events = (b"" if has_calls else self._begin("message")) + self._close(status)
        response = self._builder.response(self._model, status, self._items, finished)
        await self._call.end(events + self._event(f"response.{status}", {"response": response}))

    def _delta(self, kind: ItemKind, text: str) -> bytes:
        if not text:
            return b""
        begun = self._begin(kind)
        self._texts.append(text)
        delta: dict[str, Any] = {**self._place(kind), "delta": text}
        if kind == "message":
            delta["logprobs"] = []
        return begun + self._event(f"response.{_PART_TYPES[kind]}.delta", delta)

    def _call_item(self, called: generate_pb2.ToolCall) -> bytes:
        """A call, which ends the item before it."""
        closed = self._close("completed")
        index = len(self._items)
        item = self._builder.call(index, called)
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        return (
            closed
            + self._event("response.output_item.added", {"output_index": index, "item": begun})
            + self._event("response.function_call_arguments.delta", {**place, "delta": called.arguments})
            + self._event("response.function_call_arguments.done", {**place, "arguments": called.arguments})
            + self._event("response.output_item.done", {"output_index": index, "item": item})
        )

    def _begin(self, kind: ItemKind) -> bytes:
        """Begins an item, and ends the one before it; nothing if it is of this kind."""
        if self._kind == kind:
            return b""
        closed = self._close("completed")
        self._kind, self._texts = kind, []
        place = self._place(kind)
        item = self._builder.item(place["output_index"], kind, "in_progress", [])
        return (
            closed
            + self._event("response.output_item.added", {"output_index": place["output_index"], "item": item})
            + self._event("response.content_part.added", {**place, "part": part(kind, "")})
        )

    def _close(self, status: str) -> bytes:
        if self._kind is None:
            return b""
        kind, text, place = self._kind, "".join(self._texts), self._place(self._kind)
        item = self._builder.item(place["output_index"], kind, status, [part(kind, text)])
        done: dict[str, Any] = {**place, "text": text}
        if kind == "message":
            done["logprobs"] = []
        self._items.append(item)
        self._kind = None
        return (
            self._event(f"response.{_PART_TYPES[kind]}.done", done)
            + self._event("response.content_part.done", {**place, "part": part(kind, text)})
            + self._event("response.output_item.done", {"output_index": place["output_index"], "item": item})
        )

    def _place(self, kind: ItemKind) -> dict[str, Any]:
        index = len(self._items)
        return {"item_id": self._builder.item_id(index, kind), "output_index": index, "content_index": 0}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        numbered = event({"type": name, "sequence_number": self._sequence, **fields}, name)
        self._sequence += 1
        return with_shown(numbered, self._builder.shown) if "response" in fields else numbered


def with_shown(made: bytes, shown: bytes) -> bytes:
    """The JSON of a response with the fields of its request. No text in JSON has the bytes of their place."""
    return made.replace(_SHOWN, shown, 1)


def json_string(text: str) -> str:
    """A text in JSON. Lets other threads run meanwhile."""
    pieces = (json.dumps(text[at : at + _PIECE])[1:-1] for at in range(0, len(text), _PIECE))
    return f'"{"".join(map(let_others_run, pieces))}"'


def part(kind: ItemKind, text: str) -> dict[str, Any]:
    """The text of an item."""
    made: dict[str, Any] = {"type": part_type(kind), "text": text}
    return {**made, "annotations": [], "logprobs": []} if kind == "message" else made


def part_type(kind: ItemKind) -> str:
    """The type of an item's text."""
    return _PART_TYPES[kind]


def status_of(finished: generate_pb2.Finished) -> str:
    """The status of a response that has ended well, or was cut."""
    return "incomplete" if finished.reason == sampling_pb2.FINISH_REASON_LENGTH else "completed"


def _usage(used: generate_pb2.Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": cache_details(used),
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }
