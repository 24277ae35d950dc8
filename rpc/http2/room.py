"""Waiting until a peer has read enough. Apart from streams, which know nothing of coroutines and can so be compiled."""

from rpc.http2.stream import Stream


async def wait_for_room(stream: Stream, size: int) -> None:
    """Waits until a message of so many bytes may be written, or the stream is closed."""
    while not stream.can_take(size) and not stream.closed:
        await stream.change()
