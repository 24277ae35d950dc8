"""Garbage collection that does not stop the event loop for long.

A full collection looks at every object of the process: 60 ms in an idle router, 260 ms in a worker with PyTorch
(2 cores, Python 3.11), while no stream gets a token. Nearly all of these objects live as long as the process.
"""

import gc
from typing import Final

# So many objects more than at the last collection begin one of the youngest; by default 700, which a few requests make.
_YOUNG_OBJECTS: Final = 5_000
# After so many of the youngest what they left is collected, too: no more of it than a few milliseconds can look at.
_YOUNG_COLLECTIONS: Final = 2
# After so many of those everything is. With 1,024 running streams that takes a router 30 to 80 ms, and frees nothing.
_MIDDLE_COLLECTIONS: Final = 300


def exempt_living_objects() -> None:
    """Collects once, then exempts the objects that are left from all later collections.

    Call it when the imports are done, also late ones, and again when a model is loaded. Reference counting still frees
    these objects.
    """
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Begins a collection after more objects than by default, and looks at few of them, and seldom at all.

    A request leaves no cycles, and its objects live for milliseconds: each of the many collections during a burst of
    requests would only look at what lives. So would full ones while streams run, whose objects live for seconds.
    """
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _MIDDLE_COLLECTIONS)
