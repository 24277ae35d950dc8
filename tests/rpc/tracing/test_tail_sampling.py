"""The documented Collector configuration keeps every failure: its policies, applied to traces of real requests.

The Collector itself is not run here: there is no package of it. What its policies mean is as its documentation says.
"""

from typing import Any

import pytest
import yaml
from support.cluster.in_process import simulated
from support.cluster.processes import ROOT
from support.cluster.traced import Traced, generated, to_the_end, tokens, traced

from baton.inference.v1 import generate_pb2 as pb
from devtools.trace_viewer.reading import ReadTrace

# Of each kind of policy: the fields that it has. A misspelt one would end the Collector at its start.
FIELDS = {
    "status_code": {"status_codes"},
    "string_attribute": {"key", "values"},
    "numeric_attribute": {"key", "min_value", "max_value"},
    "latency": {"threshold_ms"},
    "probabilistic": {"sampling_percentage"},
}


def recipe() -> dict[str, Any]:
    """The configuration in docs/tracing.md."""
    page = (ROOT / "docs/tracing.md").read_text()
    (block,) = [part for part in page.split("```yaml\n")[1:] if "tail_sampling" in part]
    loaded = yaml.safe_load(block.partition("```")[0])
    assert isinstance(loaded, dict)
    return loaded


def policies() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = recipe()["processors"]["tail_sampling"]["policies"]
    return found


def kept_by(trace: ReadTrace) -> list[str]:
    """The policies that keep a trace, chance and slowness left aside."""
    return [policy["name"] for policy in policies() if policy["type"] in _MEANINGS and _keeps(policy, trace)]


def _keeps(policy: dict[str, Any], trace: ReadTrace) -> bool:
    """One span is enough."""
    means, options = _MEANINGS[policy["type"]], policy[policy["type"]]
    return any(means(options, span) for span in trace.spans)


_MEANINGS: dict[str, Any] = {
    "status_code": lambda options, span: "ERROR" in options["status_codes"] and span.is_error,
    "string_attribute": lambda options, span: span.attributes.get(options["key"]) in options["values"],
    "numeric_attribute": lambda options, span: (
        options["min_value"] <= span.attributes.get(options["key"], -1) <= options["max_value"]
    ),
}


def test_every_policy_is_of_a_documented_kind_with_its_fields() -> None:
    for policy in policies():
        assert policy.keys() == {"name", "type", policy["type"]}
        assert policy[policy["type"]].keys() == FIELDS[policy["type"]]


def test_what_is_in_the_pipeline_is_configured() -> None:
    whole = recipe()
    pipeline = whole["service"]["pipelines"]["traces"]
    assert {part: list(whole[part]) for part in ("receivers", "processors", "exporters")} == pipeline


CLUSTER = [
    simulated("p1", "prefill", allow_faults=True),
    simulated("d1", "decode", allow_faults=True, decode_step_seconds=0.01),
    simulated("d2", "decode", allow_faults=True, decode_step_seconds=0.01),
]


async def traced_request(plan: str, **fields: Any) -> ReadTrace:
    async with traced(*CLUSTER) as cluster:
        await generated(cluster, plan=plan, **fields)
        return cluster.trace()


@pytest.mark.parametrize(
    ("plan", "prompt", "kept"),
    [
        ("", "hello", []),
        ("", "", ["errors"]),
        ("drop@queue;attempt=any", "hello", ["errors", "moved"]),
        ("drop@decode:3", "hello", ["errors", "moved"]),
    ],
    ids=["ok", "refused", "failed", "moved"],
)
async def test_a_request_that_did_not_simply_go_well_is_kept(plan: str, prompt: str, kept: list[str]) -> None:
    assert kept_by(await traced_request(plan, prompt=prompt, stopping={"max_tokens": 5})) == kept


@pytest.mark.parametrize("by_request", [True, False], ids=["cancelled", "client gone"])
async def test_one_that_was_stopped_is_kept(by_request: bool) -> None:
    async with traced(*CLUSTER) as cluster:
        call = cluster.running.stub.Generate(
            pb.GenerateRequest(prompt="hello", request_id="r-1", stopping={"max_tokens": 500})
        )
        await tokens(call, 3)
        await stop(cluster, call, by_request=by_request)
        await to_the_end(call)
        await cluster.verdict()
        assert kept_by(cluster.trace()) == ["cancels"]


async def stop(cluster: Traced, call: Any, *, by_request: bool) -> None:
    if by_request:
        await cluster.running.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="r-1"))
    else:
        call.cancel()
