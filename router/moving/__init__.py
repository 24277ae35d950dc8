"""Running decodes that are moved to other workers, with their KV; the router that reads a stream moves it.

* `decodes.py`: the decodes that this router reads, by their workers.
* `move.py`: the move of one: its KV is copied while it goes on, then it yields.
* `mover.py`: which are moved: those of workers that end, or that want to give some away.
* `yielded.py`: a decode that has ended on its worker and not begun on the next.

The decode that follows is `RequestExecution`'s, as after a prefill.
"""
