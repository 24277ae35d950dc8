"""The methods of both clients as a notebook shows them: arguments, defaults and docstrings."""

import inspect
from typing import Any

import pytest

from baton import AsyncClient, Client

METHODS = [name for name, _ in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")]


def arguments(client: type, method: str) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(getattr(client, method)).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def test_a_generation_shows_its_options_and_their_meaning() -> None:
    signature = inspect.signature(Client("127.0.0.1:1").generate)
    assert list(signature.parameters)[:4] == ["request", "images", "model", "max_tokens"]
    assert signature.parameters["timeout_seconds"].default is None
    assert signature.return_annotation == "Generation"
    assert "temperature: Sampling temperature; 0 is greedy." in str(inspect.getdoc(Client.generate))


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_client_shows_the_arguments_of_its_connection(client: type) -> None:
    expected = ["address", "tls", "token", "tenant", "retry", "resume", "tracer_provider"]
    assert list(inspect.signature(client).parameters) == expected
    assert "authorization: Bearer TOKEN" in str(client.__init__.__doc__)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "close"])
def test_both_clients_take_the_same_arguments(method: str) -> None:
    assert arguments(Client, method) == arguments(AsyncClient, method)
    assert inspect.getdoc(getattr(Client, method)) == inspect.getdoc(getattr(AsyncClient, method))


def test_a_whole_answer_takes_the_arguments_of_a_streamed_one() -> None:
    assert arguments(Client, "generate_unary") == arguments(Client, "generate")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_what_it_does(method: str) -> None:
    assert len(str(inspect.getdoc(getattr(Client, method)))) > 20


def test_an_option_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="max_token"):
        Client("127.0.0.1:1").generate("hello", max_token=3)  # type: ignore[call-arg]  # the mistake under test
