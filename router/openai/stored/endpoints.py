"""The routes under /v1/responses/{id}: retrieve, cancel, delete."""

import json
from collections.abc import Mapping

from baton.errors import InvalidRequest
from router.openai.call import HttpCall
from router.openai.choices import EVENTS
from router.openai.resumable.responses import numbered
from router.openai.stored.service import ResponseService
from router.openai.stored.table import StoredResponse

PATH = "/v1/responses/"
CANCEL = "/cancel"
# As routes, and in logs.
RESPONSE_PATH, CANCEL_PATH = "/v1/responses/{id}", "/v1/responses/{id}/cancel"
_MOST_NUMBER = 2**53
_BOOLEANS = {"true": True, "false": False}


class StoredEndpoints:
    """The handlers of a response's own paths."""

    def __init__(self, service: ResponseService) -> None:
        self._service = service

    async def retrieve(self, call: HttpCall, path: str) -> None:
        """The response as far as it has come, or its events after a number."""
        query = {name: values[-1] for name, values in call.query.items()}
        streams, after = _is_stream(query), _starting_after(query)
        entry = await self._service.find(path.removeprefix(PATH), call)
        if streams:
            if not entry.is_background:
                raise InvalidRequest.of("stream", "is for responses in the background; this one is retrieved whole")
            await stream_events(call, entry, after)
        else:
            await call.respond(200, entry.document.response())

    async def delete(self, call: HttpCall, path: str) -> None:
        """Forgets the response."""
        identity = path.removeprefix(PATH)
        await self._service.delete(await self._service.find(identity, call), call)
        body = {"id": identity, "object": "response", "deleted": True}
        await call.respond(200, json.dumps(body).encode())

    async def cancel(self, call: HttpCall, path: str) -> None:
        """Ends the response, as far as it has come."""
        entry = await self._service.find(path.removeprefix(PATH).removesuffix(CANCEL), call)
        await self._service.cancel(entry, call)
        await call.respond(200, entry.document.response())


async def stream_events(call: HttpCall, entry: StoredResponse, after: int = -1) -> None:
    """Writes the events of a response after a number, as they come. It goes on without its reader."""
    await call.begin(200, EVENTS)
    document = entry.document
    async with call.while_connected():
        while True:
            events = list(document.events(after))
            if events:
                after = events[-1].number
                await call.write(b"".join(numbered(one) for one in events))
            elif document.has_ended or document.has_left:
                break
            else:
                await document.change()
        await call.end()


def _is_stream(query: Mapping[str, str]) -> bool:
    """True if events are asked for. Raises InvalidRequest for any option that is not known."""
    known = {"stream", "starting_after", "include_obfuscation"}
    for name in query:
        if name not in known:
            raise InvalidRequest.of(name[:80], "is not known here")
    if _boolean(query, "include_obfuscation"):
        raise InvalidRequest.of("include_obfuscation", "is not supported")
    return _boolean(query, "stream")


def _boolean(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "false").lower()
    if text not in _BOOLEANS:
        raise InvalidRequest.of(name, "is neither true nor false")
    return _BOOLEANS[text]


def _starting_after(query: Mapping[str, str]) -> int:
    text = query.get("starting_after")
    if text is None:
        return -1
    if not (text.isascii() and text.isdecimal() and len(text) < 17) or int(text) >= _MOST_NUMBER:
        raise InvalidRequest.of("starting_after", "is not the number of an event")
    if not _boolean(query, "stream"):
        raise InvalidRequest.of("starting_after", "is for streams: set stream=true")
    return int(text)
