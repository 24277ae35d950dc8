"""Builds a GenerateRequest from the options of `baton generate`."""

import argparse
import re
import sys
from pathlib import Path

from baton.errors import InvalidRequest
from baton.files import LARGEST_REQUEST_BYTES, read_file
from baton.generation import requests
from baton.images import Image, media_item, user_message
from baton.inference.v1 import generate_pb2
from baton.sampling_options import OPTIONS

UINT32 = 2**32 - 1
_URI = re.compile(r"(data|https?|file):")


def build(arguments: argparse.Namespace) -> generate_pb2.GenerateRequest:
    """The request that the options describe; fields without an option stay unset. Raises InvalidRequest."""
    request = generate_pb2.GenerateRequest(model=text_of("model", arguments.model))
    _set_input(request, arguments)
    set_sampling(request, arguments)
    _set_guided(request, arguments)
    if arguments.min_tokens_per_message is not None:
        request.response.min_tokens_per_message = arguments.min_tokens_per_message
    return request


def set_sampling(request: generate_pb2.GenerateRequest, arguments: argparse.Namespace) -> None:
    """Sets what the options say of the adapter, of sampling and of when to stop. Raises InvalidRequest."""
    request.lora_name = text_of("lora_name", arguments.lora)
    requests.set_sampling(request.sampling, {name: getattr(arguments, name) for name in OPTIONS})
    if arguments.max_tokens is not None:
        request.stopping.max_tokens = arguments.max_tokens
    request.stopping.stop.extend(text_of("stopping.stop", each) for each in arguments.stop)


def set_prompt(request: generate_pb2.GenerateRequest, arguments: argparse.Namespace) -> None:
    """Sets the text, or the token ids, that PROMPT says. Raises InvalidRequest."""
    prompt = _prompt(arguments)
    if arguments.token_ids:
        request.token_ids.ids.extend(_ids(prompt))
    else:
        request.prompt = text_of("prompt", prompt)


def _set_input(request: generate_pb2.GenerateRequest, arguments: argparse.Namespace) -> None:
    images = [image_of(each) for each in arguments.image]
    is_chat = arguments.chat or arguments.system is not None or (images and not arguments.raw)
    if is_chat and not arguments.token_ids:
        _set_chat(request.chat, arguments.system, _prompt(arguments), images)
        return
    set_prompt(request, arguments)
    request.media.extend(media_item(image) for image in images)


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt != "-":
        return str(arguments.prompt)
    return standard_input("prompt")


def standard_input(field: str) -> str:
    """All of standard input. Raises InvalidRequest naming the field if that is more than a request may have."""
    content = sys.stdin.buffer.read(LARGEST_REQUEST_BYTES + 1)
    if len(content) > LARGEST_REQUEST_BYTES:
        raise InvalidRequest.of(field, f"has more than {LARGEST_REQUEST_BYTES} bytes")
    return content.decode("utf-8", "surrogateescape")


def _set_guided(request: generate_pb2.GenerateRequest, arguments: argparse.Namespace) -> None:
    if arguments.json_schema is not None:
        request.guided.json_schema = _file_text("guided.json_schema", arguments.json_schema)
    elif arguments.grammar is not None:
        request.guided.grammar = _file_text("guided.grammar", arguments.grammar)
    elif arguments.regex is not None:
        request.guided.regex = text_of("guided.regex", arguments.regex)
    elif arguments.choice:
        texts = [text_of(f"guided.choice.texts[{index}]", text) for index, text in enumerate(arguments.choice)]
        request.guided.choice.texts.extend(texts)


def _file_text(field: str, path: str) -> str:
    """The text of a file. Raises InvalidRequest naming the field if it cannot be read."""
    try:
        return read_file(path, LARGEST_REQUEST_BYTES).decode()
    except OSError as error:
        raise InvalidRequest.of(field, f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest.of(field, f"{path} cannot be read: {error}") from None


def _set_chat(chat: generate_pb2.ChatInput, system: str | None, prompt: str, images: list[Image]) -> None:
    if system is not None:
        part = generate_pb2.ContentPart(text=text_of("chat.messages[0].parts[0].text", system))
        chat.messages.append(generate_pb2.ChatMessage(role="system", parts=[part]))
    path = f"chat.messages[{len(chat.messages)}].parts[{len(images)}].text"
    chat.messages.append(user_message(text_of(path, prompt), images))


def image_of(text: str) -> Image:
    """The image that a word of the command line names: a URI, or the path of a file."""
    return text if _URI.match(text) else Path(text)


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    for index, word in enumerate(words):
        if not word.isascii() or not word.isdigit() or int(word) > UINT32:
            raise InvalidRequest.of(f"token_ids.ids[{index}]", f"{word!r} is not a token id")
    return [int(word) for word in words]


def text_of(field: str, text: str) -> str:
    """Returns the text. Raises InvalidRequest if it has lone surrogates, Python's form of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest.of(field, f"is not valid UTF-8 at character {error.start}") from None
    return text
