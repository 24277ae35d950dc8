"""Options that were right once are not checked again; what differs from request to request always is."""

import pytest
from support.engines.checkpoints import DEMO

from baton.errors import InvalidRequest, Unsupported
from baton.inference.v1 import generate_pb2, model_pb2
from router.config import LimitsConfig
from router.text.served_model import ServedModel
from router.text.tokenizer import Tokenizer
from router.validation import OptionChecks

LIMITS = model_pb2.ModelLimits(max_context_tokens=100, vocab_size=1000)


def served(tokenizer: Tokenizer | None) -> ServedModel:
    return ServedModel("m", LIMITS, model_pb2.ModelCapabilities(), frozenset(), tokenizer)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return served(Tokenizer((DEMO / "tokenizer.json").read_bytes(), "", ""))


@pytest.fixture
def checks(model: ServedModel) -> OptionChecks:
    """Checks that know the options of `request`."""
    known = OptionChecks(LimitsConfig())
    known.check(request(), model)
    return known


def request(prompt: str = "a fox", request_id: str = "r-1", session_key: str = "") -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        prompt=prompt, request_id=request_id, routing={"session_key": session_key}, stopping={"max_tokens": 5}
    )


def refused(checks: OptionChecks, wrong: generate_pb2.GenerateRequest, model: ServedModel) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        checks.check(wrong, model)
    return [violation.field for violation in caught.value.violations]


def test_another_text_id_and_session_with_known_options_are_right(checks: OptionChecks, model: ServedModel) -> None:
    checks.check(request("another fox", "r-2", "s-1"), model)


def test_a_wrong_text_id_or_session_is_found_though_the_options_are_known(
    checks: OptionChecks, model: ServedModel
) -> None:
    assert refused(checks, request(prompt=""), model) == ["prompt"]
    assert refused(checks, request(request_id="\n"), model) == ["request_id"]
    assert refused(checks, request(session_key="s" * 2000), model) == ["routing.session_key"]


def test_wrong_options_are_refused_each_time(checks: OptionChecks, model: ServedModel) -> None:
    wrong = request()
    wrong.sampling.top_p = 2.0
    for _ in range(2):
        assert refused(checks, wrong, model) == ["sampling.top_p"]


def test_options_are_known_for_one_model_alone(checks: OptionChecks) -> None:
    with pytest.raises(Unsupported, match="prompt"):
        checks.check(request(), served(None))


def test_very_many_options_are_not_all_remembered(checks: OptionChecks, model: ServedModel) -> None:
    for seed in range(1000):
        one = request()
        one.sampling.seed = seed
        checks.check(one, model)
    assert refused(checks, request(prompt=""), model) == ["prompt"]
