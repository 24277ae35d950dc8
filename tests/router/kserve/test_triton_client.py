"""NVIDIA's own client, `tritonclient`, unchanged, against the router's port."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cluster.in_process import DECODE, PATIENT, PREFILL, Bench, bench

PROGRAM = Path(__file__).resolve().parents[2] / "support" / "clients" / "triton_program.py"


async def answers_of(address: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), address, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    answers: dict[str, Any] = json.loads(output)
    return answers


@pytest.mark.timeout(120)
@pytest.mark.feature("text prompts", engine="simulated", facade="kserve")
@pytest.mark.feature("whole answers", engine="simulated", facade="kserve")
@pytest.mark.feature("streaming", engine="simulated", facade="kserve")
async def test_tritons_client_gets_what_grpc_answers() -> None:
    async with bench(PREFILL, DECODE, router=PATIENT) as running:
        answers = await answers_of(running.address)
        texts = [await text_of(running, seed) for seed in (7, 8, 9)]
    assert answers["ready"] == [True, True, True]
    assert answers["unknown ready"] is False
    assert (answers["inputs"], answers["decoupled"]) == (["text_input", "stream", "sampling_parameters"], True)
    assert answers["whole"] == [texts[0], "length", "mine"]
    assert answers["several"] == texts
    assert answers["by_json"] == [[texts[0]], 1]
    check_stream(answers["stream"], "one", texts[0])
    for name in ("r0", "r1", "r2"):
        check_stream([one for one in answers["streams"] if one["id"] == name], name, texts[0])
    error, *others = answers["wrong"] if "error" in answers["wrong"][0] else reversed(answers["wrong"])
    assert error["error"] == "[INVALID_REQUEST] inputs.text_input: is missing"
    assert {one["id"] for one in others} == {"after"}
    statuses = [status for status, _ in answers["statuses"]]
    assert statuses == [*["StatusCode.INVALID_ARGUMENT"] * 3, "StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT"]
    messages = [message for _, message in answers["statuses"]]
    fields = ["parameters.max_tokenz", "sampling.temperature", "parameters.temperature", "other", "inputs.text_input"]
    assert [field for field, message in zip(fields, messages, strict=True) if field not in message] == []


def check_stream(messages: list[dict[str, Any]], name: str, text: str) -> None:
    assert {one["id"] for one in messages} == {name}
    assert "".join("".join(one["text"]) for one in messages) == text
    assert [one["final"] for one in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1]["reason"] == ["length"]


async def text_of(running: Bench, seed: int) -> str:
    sampling = {"temperature": 1.0, "seed": seed}
    return await running.text_of(prompt="hello", sampling=sampling, stopping={"max_tokens": 12})
