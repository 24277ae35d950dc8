"""Answers as messages of Anthropic's API: whole, or streamed as events."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from baton.errors import BatonError
from baton.inference.v1 import generate_pb2, sampling_pb2
from router.anthropic.errors import describe
from router.openai.call import HttpCall
from router.openai.choices import EVENTS, event
from router.stream.collector import UnaryCollector

_HOUR_SECONDS = 3600
_DELTAS: Mapping[str, tuple[str, str]] = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessageHead:
    """The parts that all messages of an answer share. `max_tokens` is what the client allows."""

    def __init__(self, identity: str, request: generate_pb2.GenerateRequest) -> None:
        self._identity = identity
        self._max_tokens = request.stopping.max_tokens
        self._is_long = request.cache.retain.ttl.seconds >= _HOUR_SECONDS

    def message(self, model: str, content: list[dict[str, Any]], ending: Mapping[str, Any]) -> dict[str, Any]:
        """The object `message`."""
        head = {"id": self._identity, "type": "message", "role": "assistant", "model": model, "content": content}
        return {**head, **ending}

    def begun(self, started: generate_pb2.Started) -> dict[str, Any]:
        """The message at the beginning of a stream. How much of the prompt was cached is known at the end."""
        usage = self.usage(generate_pb2.Usage(prompt_tokens=started.prompt_tokens))
        return self.message(started.model, [], {"stop_reason": None, "stop_sequence": None, "usage": usage})

    def ending(self, finished: generate_pb2.Finished, *, has_calls: bool) -> dict[str, Any]:
        """The reason for the answer's end."""
        match finished.reason:
            case sampling_pb2.FINISH_REASON_LENGTH:
                is_asked = finished.usage.completion_tokens >= self._max_tokens
                reason = "max_tokens" if is_asked else "model_context_window_exceeded"
            case sampling_pb2.FINISH_REASON_STOP_STRING:
                return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
            case _:
                reason = "tool_use" if has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def usage(self, used: generate_pb2.Usage) -> dict[str, Any]:
        """The object `usage`. Its three counts of input tokens together are the prompt."""
        created = max(0, used.retained_tokens - used.cached_tokens)
        return {
            "input_tokens": used.prompt_tokens - used.cached_tokens - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": used.cached_tokens,
            "cache_creation": {
                "ephemeral_5m_input_tokens": 0 if self._is_long else created,
                "ephemeral_1h_input_tokens": created if self._is_long else 0,
            },
            "output_tokens": used.completion_tokens,
        }


def whole(head: MessageHead, collected: UnaryCollector) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    response = collected.response
    token, finished = response.token, response.finished
    content: list[dict[str, Any]] = []
    if token.reasoning:
        signature = sign(token.reasoning)
        content.append({"type": "thinking", "thinking": token.reasoning, "signature": signature})
    if token.text:
        content.append({"type": "text", "text": token.text})
    content += [{**_call(call), "input": json.loads(call.arguments)} for call in token.tool_calls]
    ending = head.ending(finished, has_calls=bool(token.tool_calls))
    return head.message(response.started.model, content, {**ending, "usage": head.usage(finished.usage)})


def sign(reasoning: str) -> str:
    """The signature of a reasoning, which clients expect to send back: a digest, since nothing here checks it."""
    return blake2b(reasoning.encode("utf-8", "replace"), digest_size=32).hexdigest()


def _call(call: generate_pb2.ToolCall | generate_pb2.ToolCallDelta) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


class MessageStream:
    """Writes an answer as the events of Anthropic's API."""

    def __init__(self, call: HttpCall, head: MessageHead) -> None:
        self._call = call
        self._head = head
        self._index = -1
        self._kind: Literal["", "text", "thinking", "tool_use"] = ""  # of the block that has begun
        self._begun: set[str] = set()  # ids of the calls that were written from their beginning
        self._has_calls = False  # that are complete
        self._reasoning: list[str] = []
        self._prefix = b""  # of a delta of this block

    async def send(self, message: generate_pb2.GenerateResponse) -> None:
        """Writes the next message of the pipeline."""
        match message.WhichOneof("event"):
            case "token":
                if events := self._events(message.token):
                    await self._call.write(events)
            case "started":
                begun = self._head.begun(message.started)
                await self._call.begin(200, EVENTS)
                await self._call.write(_event("message_start", message=begun) + _event("ping"))
            case "finished":
                await self._end(message.finished)

    async def fail(self, error: BatonError) -> None:
        """Ends the stream with an event that Anthropic's clients raise as an error."""
        await self._call.end(
            _event("error", error=describe(error, self._call.places), request_id=self._call.request_id)
        )

    async def _end(self, finished: generate_pb2.Finished) -> None:
        ending = self._head.ending(finished, has_calls=self._has_calls)
        usage = self._head.usage(finished.usage)
        del usage["cache_creation"]
        last = self._close() + _event("message_delta", delta=ending, usage=usage) + _event("message_stop")
        await self._call.end(last)

    def _events(self, delta: generate_pb2.TokenDelta) -> bytes:
        """The call that has begun, then the texts, which follow it, then other calls."""
        pieces, calls = delta.tool_call_deltas, delta.tool_calls
        begin = next((at for at, one in enumerate(pieces) if one.id), len(pieces))
        ended = sum(one.id in self._begun for one in calls)
        events = self._calls_of(pieces[:begin], calls[:ended])
        events += self._text("thinking", delta.reasoning) + self._text("text", delta.text)
        return events + self._calls_of(pieces[begin:], calls[ended:])

    def _text(self, kind: Literal["text", "thinking"], text: str) -> bytes:
        """A delta of a text, in the block of its kind. Built from a prefix: they are almost all of a stream."""
        if not text:
            return b""
        begun = b"" if kind == self._kind else self._open_text(kind)
        if kind == "thinking":
            self._reasoning.append(text)
        return b"%s%s%s}}\n\n" % (begun, self._prefix, json.dumps(text).encode())

    def _open_text(self, kind: Literal["text", "thinking"]) -> bytes:
        block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
        begun = self._close() + self._open(block)
        self._kind = kind
        name, field = _DELTAS[kind]
        self._prefix = (
            f'event: content_block_delta\ndata: {{"type": "content_block_delta", "index": {self._index}, '
            f'"delta": {{"type": "{name}", "{field}": '
        ).encode()
        return begun

    def _calls_of(self, pieces: Sequence[generate_pb2.ToolCallDelta], calls: Sequence[generate_pb2.ToolCall]) -> bytes:
        """More of calls that are being written, and those that are complete, in their order."""
        left, events = deque(pieces), b""
        indexes = {one.id: one.index for one in pieces if one.id}
        for called in calls:
            last = indexes.get(called.id, 0 if called.id in self._begun else -1)
            while left and (not left[0].id or left[0].index <= last):
                events += self._piece(left.popleft())
            if called.id not in self._begun:
                events += self._begin_call(called) + self._input(called.arguments)
            events += self._close()
            self._has_calls = True
        return events + b"".join(map(self._piece, left))

    def _piece(self, piece: generate_pb2.ToolCallDelta) -> bytes:
        begun = self._begin_call(piece) if piece.id else b""
        if piece.id:
            self._begun.add(piece.id)
        return begun + self._input(piece.arguments)

    def _begin_call(self, called: generate_pb2.ToolCall | generate_pb2.ToolCallDelta) -> bytes:
        events = self._close() + self._open({**_call(called), "input": {}})
        self._kind = "tool_use"
        return events

    def _input(self, text: str) -> bytes:
        return self._delta(type="input_json_delta", partial_json=text) if text else b""

    def _open(self, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        """Ends the block that has begun, if there is one."""
        if not self._kind:
            return b""
        signed = b""
        if self._kind == "thinking":
            signed = self._delta(type="signature_delta", signature=sign("".join(self._reasoning)))
            self._reasoning.clear()
        self._kind = ""
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
