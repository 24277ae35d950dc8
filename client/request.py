"""From the options of `baton generate` to a GenerateRequest."""

import argparse
import re
import sys
from pathlib import Path

from baton.inference.v1 import generate_pb2, sampling_pb2

from client.images import Image, media_item, user_message
from rpc.errors import InvalidRequest

UINT32 = 2**32 - 1
_URI = re.compile(r"(data|https?|file):")


def build(arguments: argparse.Namespace) -> generate_pb2.GenerateRequest:
    """The request that the options describe; what was not given stays unset. Raises InvalidRequest."""
    request = generate_pb2.GenerateRequest(model=_text("model", arguments.model))
    _set_input(request, arguments)
    _set_sampling(request.sampling, arguments)
    if arguments.max_tokens is not None:
        request.stopping.max_tokens = arguments.max_tokens
    request.stopping.stop.extend(_text("stopping.stop", each) for each in arguments.stop)
    return request


def _set_input(request: generate_pb2.GenerateRequest, arguments: argparse.Namespace) -> None:
    prompt = sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if arguments.prompt == "-" else arguments.prompt
    images = [_image(each) for each in arguments.image]
    if arguments.token_ids:
        request.token_ids.ids.extend(_ids(prompt))
    elif arguments.chat or arguments.system is not None or (images and not arguments.raw):
        _set_chat(request.chat, arguments.system, prompt, images)
        return
    else:
        request.prompt = _text("prompt", prompt)
    request.media.extend(media_item(image) for image in images)


def _set_chat(chat: generate_pb2.ChatInput, system: str | None, prompt: str, images: list[Image]) -> None:
    if system is not None:
        part = generate_pb2.ContentPart(text=_text("chat.messages[0].parts[0].text", system))
        chat.messages.append(generate_pb2.ChatMessage(role="system", parts=[part]))
    path = f"chat.messages[{len(chat.messages)}].parts[{len(images)}].text"
    chat.messages.append(user_message(_text(path, prompt), images))


def _image(text: str) -> Image:
    return text if _URI.match(text) else Path(text)


def _set_sampling(sampling: sampling_pb2.SamplingParams, arguments: argparse.Namespace) -> None:
    if arguments.temperature is not None:
        sampling.temperature = arguments.temperature
    if arguments.top_p is not None:
        sampling.top_p = arguments.top_p
    if arguments.seed is not None:
        sampling.seed = arguments.seed


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    for index, word in enumerate(words):
        if not word.isascii() or not word.isdigit() or int(word) > UINT32:
            raise InvalidRequest.of(f"token_ids.ids[{index}]", f"{word!r} is not a token id")
    return [int(word) for word in words]


def _text(field: str, text: str) -> str:
    """The text, unless the terminal's bytes were not UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest.of(field, f"is not valid UTF-8 at character {error.start}") from None
    return text
