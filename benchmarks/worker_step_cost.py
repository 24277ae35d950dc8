"""The cost of an engine's step to a decode worker's event loop: `python -m benchmarks.worker_step_cost`.

Sequences that are pulled (services/roles/decode.py) tell the shared stream that they have a token, and the stream's
writer pulls the tokens of all and makes the message. Printed is the time of that for one step, the least and the median
of many, with as many sequences as asked. gRPC's own write of the message comes on top, once a step.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

from engine_protocol.multiplex.response_queue import CallTokens, ResponseQueue
from services.engines.answer import Finished

STEPS = 500


class Steps:
    """A generation, one token a step."""

    async def subscribe(self, ready: Callable[[], None]) -> None:
        """Keeps what is called at each step."""
        self.ready = ready

    def pull(self) -> tuple[Sequence[int], Finished | None]:
        """A token."""
        return (17,), None


async def measure(sequences: int) -> list[float]:
    """The seconds of each step."""
    queue, engine = ResponseQueue(), []
    for number in range(sequences):
        steps = Steps()
        await steps.subscribe(CallTokens(queue, number, steps, is_paused=False).mark_ready)
        engine.append(steps)
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        for steps in engine:
            steps.ready()
        batch = await queue.pull()
        batch.message.SerializeToString()
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1024])
    for count in parser.parse_args().sequences:
        found = asyncio.run(measure(count))
        least, middle = min(found) * 1e6, statistics.median(found) * 1e6
        print(
            f"{count} sequences: {least:.0f} us at least, {middle:.0f} us in the middle, {middle / count:.2f} us each"
        )
