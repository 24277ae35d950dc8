"""Objects that only the garbage collector frees, and the cycles that keep them."""

import gc
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def watch() -> None:
    """Collects nothing from now on; `found` says what should have been."""
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)


def found() -> tuple[int, list[str]]:
    """The number of objects in cycles, and the shortest cycles among them, in words; then forgets them."""
    gc.collect()
    garbage = {id(each): each for each in gc.garbage if each is not gc.garbage}
    gc.set_debug(0)
    gc.garbage.clear()
    try:
        return len(garbage), list(dict.fromkeys(_cycles(garbage)))
    finally:
        garbage.clear()
        gc.enable()
        gc.unfreeze()


def _cycles(garbage: Mapping[int, Any]) -> Iterator[str]:
    """Of each object in a cycle one shortest cycle; those of which another object has said it are left out."""
    edges = {
        number: [id(other) for other in gc.get_referents(each) if id(other) in garbage]
        for number, each in garbage.items()
    }
    said: set[int] = set()
    for number in garbage:
        if number not in said and (cycle := _shortest(number, edges)):
            said.update(cycle)
            yield " > ".join(_in_words(garbage[each]) for each in cycle)


def _shortest(start: int, edges: Mapping[int, Sequence[int]]) -> list[int]:
    """The shortest cycle through an object; empty if there is none."""
    before: dict[int, int] = {}
    waiting = deque([start])
    while waiting:
        number = waiting.popleft()
        for other in edges[number]:
            if other == start:
                path = [number]
                while path[-1] != start:
                    path.append(before[path[-1]])
                return path[::-1]
            if other not in before:
                before[other] = number
                waiting.append(other)
    return []


def _in_words(each: object) -> str:
    match each:
        case types.FrameType():
            return f"frame of {each.f_code.co_name} ({each.f_code.co_filename.rpartition('/')[2]}:{each.f_lineno})"
        case types.FunctionType() | types.CoroutineType() | types.GeneratorType() | types.AsyncGeneratorType():
            return f"{type(each).__name__} {each.__qualname__}"
        case types.MethodType():
            return f"method {each.__func__.__qualname__}"
        case BaseException():
            return f"{type(each).__name__}({each})"[:80]
        case _:
            return f"{type(each).__module__}.{type(each).__qualname__}".removeprefix("builtins.")
