"""Error messages in a terminal."""

import pytest

from baton.errors import (
    BatonError,
    ConfigError,
    EngineFailed,
    FieldViolation,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    Overloaded,
    Unavailable,
    Unsupported,
)
from cli.failures import describe, exit_code


def test_every_wrong_field_is_named() -> None:
    error = InvalidRequest([FieldViolation("prompt", "is empty"), FieldViolation("sampling.top_p", "must be above 0")])
    assert describe(error) == "error: INVALID_REQUEST: prompt: is empty; sampling.top_p: must be above 0"


def test_it_says_where_it_happened() -> None:
    error = EngineFailed("out of memory", stage="decode", worker_id="decode-0")
    assert describe(error) == "error: ENGINE_FAILED: out of memory (at decode on decode-0)"


def test_it_says_when_to_try_again() -> None:
    assert describe(Overloaded("no room", retry_after_seconds=1.5)) == "error: OVERLOADED: no room (retry in 1.5 s)"


def test_a_router_without_workers_is_not_taken_for_one_that_is_not_there() -> None:
    assert "nothing answers" not in describe(NoWorker("no decode worker is ready"), "127.0.0.1:7070")


def test_a_router_that_is_not_there_is_named() -> None:
    assert "no response from 127.0.0.1:7070" in describe(Unavailable("connection refused"), "127.0.0.1:7070")


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest.of("prompt", "is empty"),
        Unsupported("no LoRA"),
        ModelNotFound("no such model"),
        ConfigError("bad"),
    ],
)
def test_what_the_caller_has_to_mend_is_exit_code_two(error: BatonError) -> None:
    assert exit_code(error) == 2


def test_everything_else_is_exit_code_one() -> None:
    assert exit_code(Unavailable("gone")) == 1
