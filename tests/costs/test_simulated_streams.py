"""The cost of a token to the simulated engine: load tests run many of them beside what they measure."""

import asyncio
import time

from support.calibration import here
from support.engines.engine_calls import collect

from services.engines.prompt import Prompt, Sampling
from services.engines.simulated.config import SimulatedConfig
from services.engines.simulated.engine import SimulatedEngine


async def test_256_streams_cost_little() -> None:
    async with SimulatedEngine(SimulatedConfig()) as engine:
        seconds = []
        for _ in range(3):
            started = time.process_time()
            sampling = Sampling(max_tokens=128, seed=1)
            await asyncio.gather(*(collect(engine.decode(Prompt((index,) * 20), sampling)) for index in range(256)))
            seconds.append(time.process_time() - started)
        assert min(seconds) / (256 * 128) < here(100e-6)
