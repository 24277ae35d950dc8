"""Validates the media of a request: number, position, modality, and placeholders in the prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.enum_names import value_name
from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import generate_pb2, media_pb2
from media.content import MediaItem
from router.text.served_model import ServedModel
from rpc.violations import Violations


@dataclass(frozen=True, slots=True)
class _Placed:
    """A media item, and its path in the request."""

    path: str
    message: media_pb2.MediaItem


def has_media(messages: Sequence[generate_pb2.ChatMessage]) -> bool:
    """True if there are media in a conversation."""
    return any(part.HasField("media") for message in messages for part in message.parts)


def count_media(request: generate_pb2.GenerateRequest) -> int:
    """The number of media items in a request."""
    if not request.HasField("chat"):
        return len(request.media)
    in_chat = sum(part.HasField("media") for turn in request.chat.messages for part in turn.parts)
    return len(request.media) + in_chat


def media_items(request: generate_pb2.GenerateRequest) -> list[MediaItem]:
    """The sources of a validated request's media, in the order of their placeholders. Copies their content."""
    if not request.media and not request.HasField("chat"):
        return []
    return [MediaItem(one.path, _source(one.message), one.message.mime_type) for one in _placed(request)]


def check_media(request: generate_pb2.GenerateRequest, max_images: int, violations: Violations) -> None:
    """Notes each item without content or with an unknown modality, misplaced items, and too many items."""
    is_chat = request.HasField("chat")
    violations.require(not (is_chat and request.media), "media", "must be in the parts of chat.messages")
    field, count = "chat.messages" if is_chat else "media", count_media(request)
    if count > max_images:
        violations.add(field, f"has {count} media of at most {max_images}")
        return
    for one in _placed(request):
        violations.require(one.message.WhichOneof("source") is not None, one.path, "has neither data nor uri")
        known = one.message.modality in media_pb2.Modality.values()
        violations.require(known, f"{one.path}.modality", f"unknown modality {one.message.modality}")


def require_modalities(request: generate_pb2.GenerateRequest, model: ServedModel) -> None:
    """Raises Unsupported for a modality that the model does not support."""
    able = {media_pb2.MODALITY_UNSPECIFIED, *model.capabilities.modalities}
    for one in _placed(request):
        if one.message.modality not in able:
            supported = ", ".join(_name(modality) for modality in model.capabilities.modalities)
            what = _name(one.message.modality)
            raise Unsupported(f"{one.path}.modality: {model.name} does not support {what}; it supports {supported}")


def require_places(request: generate_pb2.GenerateRequest, token_ids: Sequence[int], model: ServedModel) -> None:
    """Raises InvalidRequest unless the prompt has one placeholder for each item."""
    if model.images is None:
        return
    places = token_ids.count(model.images.placeholder_token_id)
    count = count_media(request)
    if places != count:
        field = "chat.messages" if request.HasField("chat") else "media"
        name = model.images.placeholder or f"of id {model.images.placeholder_token_id}"
        raise InvalidRequest.of(field, f"has {count} media for {places} placeholders {name} in the prompt")


def _placed(request: generate_pb2.GenerateRequest) -> Iterator[_Placed]:
    for index, message in enumerate(request.media):
        yield _Placed(f"media[{index}]", message)
    for index, turn in enumerate(request.chat.messages):
        for number, part in enumerate(turn.parts):
            if part.HasField("media"):
                yield _Placed(f"chat.messages[{index}].parts[{number}].media", part.media)


def _source(message: media_pb2.MediaItem) -> bytes | str:
    return message.uri if message.WhichOneof("source") == "uri" else message.data


def _name(modality: media_pb2.Modality.ValueType) -> str:
    return value_name(media_pb2.Modality, modality)
