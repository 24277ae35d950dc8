"""Answers as OpenAI's choices: whole, or streamed as server-sent events."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, sampling_pb2
from router.openai.call import HttpCall
from router.openai.errors import describe
from router.openai.resumable.event_ids import EventIds
from router.stream.collector import UnaryCollector
from runtime.clock import wall_time

Kind = Literal["chat", "text"]
TokenText = Callable[[int], str]

EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_DONE = b"data: [DONE]\n\n"
# For clients of streams with ids: how long they wait before they ask for the rest.
RETRY = b"retry: 200\n\n"


@dataclass(frozen=True, slots=True)
class Answering:
    """The fields that all chunks of an answer share. `token_text` names tokens in logprobs."""

    kind: Kind
    identity: str
    token_text: TokenText
    created: int

    @property
    def object(self) -> str:
        """The name of a whole answer's kind."""
        return "chat.completion" if self.kind == "chat" else "text_completion"

    @property
    def chunk_object(self) -> str:
        """The name of a chunk's kind."""
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def logprobs(self, delta: generate_pb2.TokenDelta, offset: int = 0) -> dict[str, Any] | None:
        """The log probabilities of a delta's tokens, which begin at `offset`; None if there are none."""
        if not delta.logprobs:
            return None
        if self.kind == "chat":
            return {"content": [self._chat_logprob(one) for one in delta.logprobs], "refusal": None}
        tokens = [self.token_text(one.token_id) for one in delta.logprobs]
        offsets = [offset]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in delta.logprobs],
            "top_logprobs": [
                named_logprobs(self.token_text, [top.token_id for top in one.top], [top.logprob for top in one.top])
                for one in delta.logprobs
            ],
            "text_offset": offsets,
        }

    def _chat_logprob(self, one: sampling_pb2.TokenLogprob) -> dict[str, Any]:
        top = [self._named(each.token_id, each.logprob) for each in one.top]
        return {**self._named(one.token_id, one.logprob), "top_logprobs": top}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token_id)
        # A token of a part of a character has no bytes here: its text is a replacement character.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class ChoiceStream:
    """Writes the answers as chunks. The chunks of text are built from a prefix: they are almost all of a stream."""

    def __init__(self, call: HttpCall, answering: Answering, wants_usage: bool, ids: EventIds | None = None) -> None:
        self._call = call
        self._answering = answering
        self._ids = ids
        had = dict(enumerate(ids.positions if ids else ()))
        self._wants_usage = wants_usage and not any(one.knows_usage for one in had.values())
        self._calls = {index: one.tool_calls for index, one in had.items() if one.tool_calls}
        self._begun: dict[tuple[int, int], str] = {}  # by answer and index, ids of calls that are partly written
        # The characters of each answer's tokens with log probabilities.
        self._offsets = {index: one.offset for index, one in had.items()}
        self._ended = {index for index, one in had.items() if one.is_finished}
        self._opened = {index for index, one in had.items() if one.has_begun}
        self._head: dict[str, Any] = {}
        self._prefix = b""

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Writes the next message of the pipeline."""
        match message.WhichOneof("event"):
            case "token":
                # Nothing, while tokens are held back that may become a call.
                if chunks := self._delta(message.token):
                    await self._call.write(chunks)
            case "started":
                await self._start(message.started)
            case "resumed":
                await self._start(message.resumed.started)
            case "answer_finished":
                await self._call.write(self._finish(message.answer_finished.index, message.answer_finished.reason))
            case "finished":
                await self._end(message.finished)

    async def fail(self, error: BatonError) -> None:
        """Ends the stream with an event that OpenAI's clients raise as an error."""
        await self._call.end(event({"error": describe(error, self._call.names)}))

    async def _start(self, started: generate_pb2.Started) -> None:
        answering = self._answering
        self._head = {
            "id": answering.identity,
            "object": answering.chunk_object,
            "created": answering.created,
            "model": started.model,
        }
        usage = ', "usage": null' if self._wants_usage else ""
        self._prefix = f'data: {json.dumps(self._head)[:-1]}{usage}, "choices": [{{"index": '.encode()
        await self._call.begin(200, EVENTS)
        if self._ids is not None:
            self._ids.start(started)
            await self._call.write(RETRY)

    def _delta(self, delta: generate_pb2.TokenDelta) -> bytes:
        opening = b"" if self._answering.kind == "text" or delta.index in self._opened else self._open(delta.index)
        if self._ids is not None:
            self._ids.positions[delta.index].add(delta)
        if delta.logprobs or delta.reasoning or delta.tool_calls or delta.tool_call_deltas:
            return opening + self._rare_delta(delta)
        if not delta.text:
            return opening
        text = json.dumps(delta.text)
        name = f'"delta": {{"content": {text}}}' if self._answering.kind == "chat" else f'"text": {text}'
        return opening + self._choice(delta.index, f'{name}, "logprobs": null, "finish_reason": null')

    def _rare_delta(self, delta: generate_pb2.TokenDelta) -> bytes:
        found = self._answering.logprobs(delta, self._offsets.get(delta.index, 0))
        logprobs = json.dumps(found)
        if self._answering.kind == "text":
            if found:
                self._offsets[delta.index] = found["text_offset"][-1] + len(found["tokens"][-1])
                if self._ids is not None:
                    self._ids.positions[delta.index].offset = self._offsets[delta.index]
            text = json.dumps(delta.text)
            return self._choice(delta.index, f'"text": {text}, "logprobs": {logprobs}, "finish_reason": null')
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.text or delta.logprobs:
            fields["content"] = delta.text
        if calls := self._call_fields(delta):
            fields["tool_calls"] = calls
        if not fields:
            return b""
        return self._choice(
            delta.index, f'"delta": {json.dumps(fields)}, "logprobs": {logprobs}, "finish_reason": null'
        )

    def _call_fields(self, delta: generate_pb2.TokenDelta) -> list[dict[str, Any]]:
        """More of the calls that are being written, and those that are complete and have not been written at all."""
        fields = [_call_piece(one) for one in delta.tool_call_deltas]
        self._begun.update({(delta.index, one.index): one.id for one in delta.tool_call_deltas if one.id})
        for one in delta.tool_calls:
            index = self._calls.get(delta.index, 0)
            while self._begun.get((delta.index, index), one.id) != one.id:
                index += 1  # that one never became complete
            self._calls[delta.index] = index + 1
            if (delta.index, index) not in self._begun:
                fields.append({"index": index, **_call(one)})
        return fields

    def _open(self, index: int) -> bytes:
        self._opened.add(index)
        self._record(index, "o")
        delta = '"delta": {"role": "assistant", "content": ""}'
        return self._choice(index, f'{delta}, "logprobs": null, "finish_reason": null')

    def _finish(self, index: int, reason: sampling_pb2.FinishReason.ValueType) -> bytes:
        self._ended.add(index)
        opening = b"" if self._answering.kind == "text" or index in self._opened else self._open(index)
        self._record(index, "f")
        named = json.dumps(finish_reason(reason, has_calls=index in self._calls))
        body = '"delta": {}' if self._answering.kind == "chat" else '"text": ""'
        return opening + self._choice(index, f'{body}, "logprobs": null, "finish_reason": {named}')

    async def _end(self, finished: generate_pb2.Finished) -> None:
        last = b"" if self._ended else self._finish(0, finished.reason)
        if self._wants_usage:
            self._record(0, "u")
            last += event({**self._head, "choices": [], "usage": usage(finished.usage)})[:-1] + (
                b"\n" if self._ids is None else self._ids.line()
            )
        await self._call.end(last + _DONE)

    def _choice(self, index: int, rest: str) -> bytes:
        return b"%s%d, %s}]}\n%s" % (
            self._prefix,
            index,
            rest.encode(),
            b"\n" if self._ids is None else self._ids.line(),
        )

    def _record(self, index: int, state: str) -> None:
        if self._ids is not None:
            self._ids.positions[index].state = state


def whole(answering: Answering, collected: UnaryCollector) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    response = collected.response
    ends = [(one.token, one.finished.reason) for one in response.answers] or [
        (response.token, response.finished.reason)
    ]
    return {
        "id": answering.identity,
        "object": answering.object,
        "created": answering.created,
        "model": response.started.model,
        "choices": [_choice(answering, index, token, reason) for index, (token, reason) in enumerate(ends)],
        "usage": usage(response.finished.usage),
    }


def _choice(
    answering: Answering, index: int, token: generate_pb2.TokenDelta, reason: sampling_pb2.FinishReason.ValueType
) -> dict[str, Any]:
    ending = {
        "logprobs": answering.logprobs(token),
        "finish_reason": finish_reason(reason, has_calls=bool(token.tool_calls)),
    }
    if answering.kind == "text":
        return {"index": index, "text": token.text, **ending}
    message: dict[str, Any] = {"role": "assistant", "content": token.text or None, "refusal": None}
    if not token.tool_calls:
        message["content"] = token.text
    else:
        message["tool_calls"] = [_call(one) for one in token.tool_calls]
    if token.reasoning:
        message["reasoning_content"] = token.reasoning
    return {"index": index, "message": message, **ending}


def usage(used: generate_pb2.Usage) -> dict[str, Any]:
    """The object `usage`. Drafts of speculative decoding are OpenAI's predictions."""
    details = {
        "accepted_prediction_tokens": used.accepted_tokens,
        "rejected_prediction_tokens": used.drafted_tokens - used.accepted_tokens,
    }
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": cache_details(used),
        "completion_tokens_details": details,
    }


def cache_details(used: generate_pb2.Usage) -> dict[str, Any]:
    """The cached tokens of a prompt, and beyond OpenAI's API those that are retained, if any are, and until when."""
    details: dict[str, Any] = {"cached_tokens": used.cached_tokens}
    if used.retained_tokens:
        details["retained_tokens"] = used.retained_tokens
        details["retained_until"] = used.retained_until.seconds
    return details


def named_logprobs(token_text: TokenText, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, float]:
    """Alternatives by their texts, the likeliest first. Of those with one text, as parts of characters, it is kept."""
    named: dict[str, float] = {}
    for token_id, logprob in zip(ids, logprobs, strict=True):
        named.setdefault(token_text(token_id), logprob)
    return named


def finish_reason(reason: sampling_pb2.FinishReason.ValueType, *, has_calls: bool) -> str:
    """The reason for an answer's end, in OpenAI's words."""
    if reason == sampling_pb2.FINISH_REASON_LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


def event(value: dict[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def now() -> int:
    """The time in whole seconds since 1970, as `created`."""
    return int(wall_time())


def _call(call: generate_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_piece(piece: generate_pb2.ToolCallDelta) -> dict[str, Any]:
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}
