"""Kept responses, and a table of them, without a router."""

from typing import Any

from support.clock import ManualClock

from baton.inference.v1 import generate_pb2
from router.config import StoredResponsesConfig
from router.openai.responses import ResponseBuilder, ResponsesRequest
from router.openai.stored.document import ResponseDocument
from router.openai.stored.table import StoredResponse, StoredResponses

ANN, BOB = b"ann", b"bob"


async def entry_of(identity: str, owner: bytes = ANN, *, ends: bool = True, **body: Any) -> StoredResponse:
    asked = ResponsesRequest(model="m", input="x", store=True, **body)
    document = ResponseDocument(ResponseBuilder(asked, identity, 0), "m")
    turn = generate_pb2.ChatMessage(role="user")
    turn.parts.add(text="hello")
    previous = asked.previous_response_id or ""
    entry = StoredResponse(identity, owner, owner.decode(), document, [turn], previous, is_background=not ends)
    if ends:
        await end(entry)
    return entry


async def end(entry: StoredResponse) -> None:
    await entry.document.send(generate_pb2.GenerateResponse(started=generate_pb2.Started(model="m")))
    await entry.document.send(generate_pb2.GenerateResponse(finished=generate_pb2.Finished()))


def table_of(clock: ManualClock | None = None, **config: Any) -> StoredResponses:
    return StoredResponses(StoredResponsesConfig(**config), clock or ManualClock())
