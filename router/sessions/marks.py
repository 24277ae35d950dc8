"""The tokens of a chat's prompt before a place in the chat: those that the chat up to there begins with, too."""

from collections.abc import Sequence

from baton.errors import InvalidRequest
from baton.inference.v1 import generate_pb2
from router.text import request_input
from router.text.served_model import ServedModel

_PIECE = 1024
_NOTHING = 1  # less than a block: 0 would be the whole prompt


def retained_tokens(
    request: generate_pb2.GenerateRequest, token_ids: Sequence[int], model: ServedModel, template_seconds: float
) -> int:
    """The number of the prompt's ids that Retention is of; 0 is all of them. Slow for long texts.

    A place within a chat is rendered a second time, up to it. The prompt is not: what both begin with is before the
    place, whatever the template does. Raises SlowTemplate as request_input.tokenize.
    """
    retain = request.cache.retain
    if not retain.HasField("chat"):
        return retain.prompt_tokens
    if _is_end(retain.chat, request.chat):
        return 0
    try:
        beginning = _beginning(retain.chat, request.chat)
        ids, _ = request_input.encode_chat(beginning, model, template_seconds, request.routing.cache_salt)
    except InvalidRequest:  # from a template that refuses the shorter chat, though not the whole one
        return _NOTHING
    return max(_NOTHING, _common(token_ids, ids))


def _is_end(place: generate_pb2.ChatPosition, chat: generate_pb2.ChatInput) -> bool:
    count = len(chat.messages)
    return place.messages == count and (not count or place.parts == len(chat.messages[-1].parts))


def _beginning(place: generate_pb2.ChatPosition, chat: generate_pb2.ChatInput) -> generate_pb2.ChatInput:
    """The chat up to the place. Of media only that they are there: their content may be large."""
    made = generate_pb2.ChatInput(tools=chat.tools, template_variables=chat.template_variables)
    for index, turn in enumerate(chat.messages[: place.messages], start=1):
        parts = turn.parts[: place.parts] if index == place.messages else turn.parts
        copy = made.messages.add(
            role=turn.role, tool_calls=turn.tool_calls, tool_call_id=turn.tool_call_id, name=turn.name
        )
        copy.reasoning = turn.reasoning
        for part in parts:
            if part.HasField("media"):
                copy.parts.add().media.modality = part.media.modality
            else:
                copy.parts.add(text=part.text)
    if not made.messages:
        # Templates refuse a chat without any message.
        made.messages.add(role="user").parts.add(text="")
    return made


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """The number of ids that both begin with."""
    most = min(len(ids), len(others))
    first = 0
    while first < most and list(ids[first : first + _PIECE]) == list(others[first : first + _PIECE]):
        first += _PIECE
    end = min(first + _PIECE, most)
    return next((at for at in range(first, end) if ids[at] != others[at]), max(min(first, most), end))
