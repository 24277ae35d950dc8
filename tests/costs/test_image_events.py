"""Pictures of megabytes are written as JSON without a hold of the event loop."""

import asyncio
import os
from collections.abc import MutableMapping
from typing import Any

from support.loop_turns import assert_never_held

from baton.inference.v1 import image_pb2
from router.openai.call import HttpCall
from router.openai.images import ImageStream

HELD_SECONDS = 0.02
PICTURE = b"\x89PNG" + os.urandom(6 * 2**20)


async def test_a_large_picture_does_not_hold_the_event_loop() -> None:
    sent: list[int] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(len(message.get("body", b"")))

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    stream = ImageStream(HttpCall({"headers": []}, receive, send), 0)
    image = image_pb2.GeneratedImage(data=PICTURE, width=1, height=1)

    async def attempt() -> None:
        await asyncio.create_task(stream.send(image))

    await assert_never_held(HELD_SECONDS, attempt)
    assert max(sent) > len(PICTURE) * 4 // 3
