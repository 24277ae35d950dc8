"""What a request leaves behind for the garbage collector: nothing, since it would have to look for it."""

import gc

from support.cluster.in_process import Bench

# The router's side of a call; workers run in this process, too.
OURS = ("router.", "rpc.http2.call", "rpc.http2.context", "rpc.http2.sender", "rpc.multiplex.replies")


async def test_the_objects_of_a_request_are_freed_without_the_garbage_collector(pair: Bench) -> None:
    await pair.generate(prompt="hello", stopping={"max_tokens": 20})
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await pair.generate(prompt="hello", stopping={"max_tokens": 20})
        gc.collect()
        left = {f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
    assert {name for name in left if name.startswith(OURS)} == set()
