"""Each row of the table of sampling options is an option everywhere, and few files name it."""

import subprocess
from pathlib import Path

import pytest

from baton.errors import InvalidRequest
from baton.generation.requests import generate_request
from baton.inference.v1 import sampling_pb2
from baton.kserve import inference_pb2
from baton.sampling_options import OPTIONS, SamplingOption, given
from cli.arguments import parse
from cli.request import build
from engine_protocol.request_rules import check_params
from router.kserve.tensors import generate_request as kserve_request
from router.openai.chat import ChatCompletionRequest
from rpc.violations import Violations
from services.engines.prompt import Sampling

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
PRODUCT = ("baton", "cli", "devtools", "discovery", "engine_protocol", "router", "rpc", "runtime", "services", "protos")
MOST_FILES = 7

every_option = pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)


def value_of(option: SamplingOption) -> float:
    """A value that is not neutral, in the range, and the same in single precision."""
    return 7 if option.kind is int else 0.5


@every_option
def test_both_facades_the_client_and_the_cli_have_it(option: SamplingOption) -> None:
    value = value_of(option)
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], option.name: value}
    assert given(ChatCompletionRequest.model_validate(body).generate_request("r").sampling) == {option.name: value}
    for name in (option.name, *option.row.kserve):
        assert given(kserve_request(kserve_call(name, value), may_stream=False).sampling) == {option.name: value}
    arguments = {option.name: value}
    assert given(generate_request("x", **arguments).sampling) == {option.name: value}  # type: ignore[arg-type]
    assert given(build(parse(["generate", "x", option.flag, str(value)])).sampling) == {option.name: value}


def kserve_call(name: str, value: float) -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name="demo")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
    field = "int64_param" if isinstance(value, int) else "double_param"
    setattr(request.parameters[name], field, value)
    return request


@every_option
def test_engines_get_it_and_its_neutral_value_unless_it_is_set(option: SamplingOption) -> None:
    assert getattr(Sampling(max_tokens=1), option.name) == option.row.neutral
    assert getattr(Sampling(max_tokens=1, **given(params(option, value_of(option)))), option.name) == value_of(option)


@every_option
def test_values_outside_of_its_range_are_refused_by_name(option: SamplingOption) -> None:
    row = option.row
    wrong = [row.low] if row.excludes_low else []
    wrong += [] if option.kind is int else [row.low - 1, row.high + 1, float("nan")]
    for value in wrong:
        violations = Violations()
        check_params("sampling", params(option, value), violations)
        with pytest.raises(InvalidRequest, match=rf"sampling\.{option.name}: must be"):
            violations.raise_any()


def params(option: SamplingOption, value: float) -> sampling_pb2.SamplingParams:
    made = sampling_pb2.SamplingParams()
    setattr(made, option.name, value)
    return made


def test_every_number_of_the_message_but_the_number_of_answers_is_a_row() -> None:
    fields = sampling_pb2.SamplingParams.DESCRIPTOR.fields
    numbers = {field.name for field in fields if field.has_presence and field.cpp_type != field.CPPTYPE_MESSAGE}
    assert numbers - {"n"} == set(OPTIONS)


def test_an_unknown_option_of_the_client_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'heat'; sampling has temperature, top_p"):
        generate_request("x", heat=1)  # type: ignore[call-arg]


def test_few_files_name_an_option_and_the_page_has_each_of_them() -> None:
    command = ["git", "grep", "-lw", "min_p", "--", *PRODUCT, ":!*.binpb"]
    named = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert len(named) <= MOST_FILES, named
    assert [name for name in named if f"`{name}`" not in PAGE] == []
