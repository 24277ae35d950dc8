"""Running decodes that are moved to other workers, with their KV; the router that reads a stream moves it.

* `decodes.py`: the decodes that this router reads, by their workers; one that has ended and not begun on the next.
* `mover.py`: which are moved: those of workers that end, or that want to give some away. The move of one: its KV is
  copied while it goes on, then it yields.

The decode that follows is `RequestExecution`'s, as after a prefill.
"""
