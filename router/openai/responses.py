"""/v1/responses: text, whole or streamed. Nothing is stored, so no response can be continued by its id."""

from typing import Annotated, Any, Literal

from pydantic import Field

from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, sampling_pb2
from router.openai.call import HttpCall
from router.openai.chat import guide
from router.openai.choices import EVENTS, event
from router.openai.errors import describe
from router.openai.fields import Fields, Number, Uint32
from router.openai.messages import ChatMessage, ContentPart, add_messages
from router.stream.collector import UnaryCollector


class InputMessage(Fields):
    """A turn. What clients send back of an earlier response is accepted."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class TextOptions(Fields):
    """`text`."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Fields):
    """The body of a request."""

    model: str = Field(default="", max_length=1024)
    input: str | list[InputMessage]
    instructions: str | None = None
    max_output_tokens: Uint32 | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    store: bool | None = None  # not stored, as the response says
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    previous_response_id: None = None

    def generate_request(self, request_id: str) -> generate_pb2.GenerateRequest:
        """The request to the pipeline. Raises Unsupported for an unknown format."""
        made = generate_pb2.GenerateRequest(request_id=request_id, model=self.model)
        made.chat.SetInParent()
        turns = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            turns.append(ChatMessage(role="user", content=self.input))
        else:
            turns += [ChatMessage(role=one.role, content=one.content) for one in self.input]
        add_messages(made.chat, turns)
        for name in ("temperature", "top_p"):
            if getattr(self, name) is not None:
                setattr(made.sampling, name, getattr(self, name))
        if self.max_output_tokens is not None:
            made.stopping.max_tokens = self.max_output_tokens
        made.routing.session_key = self.prompt_cache_key or ""
        guide(made, "text.format", self.text.format if self.text else None)
        return made


class ResponseBuilder:
    """Builds the object `response`, and the objects in it."""

    def __init__(self, request: ResponsesRequest, identity: str, created: int) -> None:
        self._request = request
        self._identity = identity
        self._created = created
        self.item_id = f"msg_{identity.removeprefix('resp_')}"

    def response(
        self, model: str, status: str, output: list[dict[str, Any]], finished: generate_pb2.Finished | None = None
    ) -> dict[str, Any]:
        """The response in one of its states."""
        request = self._request
        is_cut = status == "incomplete"
        return {
            "id": self._identity,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": _usage(finished.usage) if finished else None,
            "metadata": request.metadata or {},
        }

    def item(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """The message in the output."""
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": parts}

    def whole(self, collected: UnaryCollector) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        answer = collected.response
        return self.ended(answer.started.model, answer.token.text, answer.finished)

    def ended(self, model: str, text: str, finished: generate_pb2.Finished) -> dict[str, Any]:
        """The response at its end."""
        status = status_of(finished)
        return self.response(model, status, [self.item(status, [text_part(text)])], finished)


class ResponseStream:
    """Writes a response as the events of OpenAI's API."""

    def __init__(self, call: HttpCall, builder: ResponseBuilder) -> None:
        self._call = call
        self._builder = builder
        self._sequence = 0
        self._model = ""
        self._texts: list[str] = []

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Writes the next message of the pipeline."""
        match message.WhichOneof("event"):
            case "token":
                if message.token.text:
                    self._texts.append(message.token.text)
                    delta = {**self._place(), "delta": message.token.text, "logprobs": []}
                    await self._call.write(self._event("response.output_text.delta", delta))
            case "started":
                await self._start(message.started)
            case "finished":
                await self._end(message.finished)

    async def fail(self, error: BatonError) -> None:
        """Ends the stream with an event that OpenAI's clients raise as an error."""
        await self._call.end(self._event("error", {"error": describe(error), **describe(error)}))

    async def _start(self, started: generate_pb2.Started) -> None:
        self._model = started.model
        response = self._builder.response(self._model, "in_progress", [])
        item = self._builder.item("in_progress", [])
        await self._call.begin(200, EVENTS)
        await self._call.write(
            self._event("response.created", {"response": response})
            + self._event("response.in_progress", {"response": response})
            + self._event("response.output_item.added", {"output_index": 0, "item": item})
            + self._event("response.content_part.added", {**self._place(), "part": text_part("")})
        )

    async def _end(self, finished: generate_pb2.Finished) -> None:
        text, status = "".join(self._texts), status_of(finished)
        item = self._builder.item(status, [text_part(text)])
        response = self._builder.ended(self._model, text, finished)
        await self._call.end(
            self._event("response.output_text.done", {**self._place(), "text": text, "logprobs": []})
            + self._event("response.content_part.done", {**self._place(), "part": text_part(text)})
            + self._event("response.output_item.done", {"output_index": 0, "item": item})
            + self._event(f"response.{status}", {"response": response})
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._builder.item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        numbered = event({"type": name, "sequence_number": self._sequence, **fields}, name)
        self._sequence += 1
        return numbered


def text_part(text: str) -> dict[str, Any]:
    """A text in a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def status_of(finished: generate_pb2.Finished) -> str:
    """The status of a response that has ended well, or was cut."""
    return "incomplete" if finished.reason == sampling_pb2.FINISH_REASON_LENGTH else "completed"


def _usage(used: generate_pb2.Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }
