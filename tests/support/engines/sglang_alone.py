"""SGLang's own engines, without Baton: what becomes of a decode whose prefill is aborted, or never comes.

`python -m support.engines.sglang_alone JSON`, with the arguments of ServerArgs for both sides, prints a JSON object for
each case.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

PATIENCE_SECONDS = 12.0
PROMPT = [(7 * index) % 200 + 10 for index in range(200)]


async def answered(engine: Any, room: int, port: int, name: str) -> dict[str, Any]:
    """The end of a request, as SGLang tells it."""
    began = time.monotonic()
    told: dict[str, Any] = {"meta_info": {}}
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
    try:
        stream = await engine.async_generate(input_ids=PROMPT, sampling_params=params, stream=True, rid=name, **where)
        async for output in stream:
            told = output
        error = ""
    except Exception as raised:  # whatever it is, it is what the caller gets
        error = f"{type(raised).__name__}: {raised}"
    finish = told["meta_info"].get("finish_reason")
    return {
        "finish": finish and finish["type"],
        "tokens": len(told.get("output_ids", ())),
        "error": error,
        "seconds": round(time.monotonic() - began, 2),
    }


async def case(prefill: Any, decode: Any, port: int, pause: float | None) -> dict[str, Any]:
    """Aborts the prefill after a pause; None: none is asked for."""
    room = random.randrange(1, 1 << 40)
    receiving = asyncio.create_task(answered(decode, room, port, f"d{room:020d}"))
    told: dict[str, Any] = {"prefill aborted after": pause}
    if pause is not None:
        computing = asyncio.create_task(answered(prefill, room, port, f"p{room:020d}"))
        await asyncio.sleep(pause)
        prefill.tokenizer_manager.abort_request(f"p{room:020d}")
        done, _ = await asyncio.wait([computing], timeout=PATIENCE_SECONDS)
        told["prefill"] = computing.result() if done else "has not ended"
    done, _ = await asyncio.wait([receiving], timeout=PATIENCE_SECONDS)
    told["decode"] = receiving.result() if done else f"waits after {PATIENCE_SECONDS} s"
    if not done:
        decode.tokenizer_manager.abort_request(f"d{room:020d}")
        await asyncio.wait([receiving], timeout=PATIENCE_SECONDS)
    return told


async def run(prefill: Any, decode: Any, port: int) -> None:
    """All cases, the first one without a failure."""
    for pause in (30.0, 0.0, 0.01, 0.03, None):
        if pause == 30.0:
            room = random.randrange(1, 1 << 40)
            both = [answered(each, room, port, f"{name}{room:020d}") for each, name in ((prefill, "p"), (decode, "d"))]
            print(json.dumps(await asyncio.gather(*both)), flush=True)
        else:
            print(json.dumps(await case(prefill, decode, port, pause)), flush=True)


def main() -> None:
    """Starts both engines in this process."""
    from sglang.srt.entrypoints.engine import Engine

    arguments = json.loads(sys.argv[1])
    sides = [Engine(**arguments, disaggregation_mode=mode) for mode in ("prefill", "decode")]
    try:
        sides[0].loop.run_until_complete(run(*sides, arguments["disaggregation_bootstrap_port"]))
    finally:
        sides[0].shutdown()


if __name__ == "__main__":
    main()
