"""A model card that cannot be used marks its worker, and affects no other."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2
from support.cluster.in_process import Bench, eventually
from support.engines.small_tokenizers import byte_level_rust
from support.router.worker_views import worker as record_of

from baton.engine.v1 import worker_pb2
from baton.inference.v1 import cluster_service_pb2
from rpc.health import Health
from rpc.server import Service, serve

_SERVICE = "baton.engine.v1.WorkerService"
_TOKENIZER = byte_level_rust().to_str().encode()

Answer = Callable[[Any], Any]


def card(**fields: Any) -> bytes:
    """GetModel's answer for a model that chats, with these fields of its card replaced."""
    good = {"name": "demo", "tokenizer_json": _TOKENIZER, "chat_template": "{{ messages[0].content }}"}
    return worker_pb2.GetModelResponse(card=worker_pb2.ModelCard(**{**good, **fields})).SerializeToString()


@asynccontextmanager
async def publishing(running: Bench, answer: Answer) -> AsyncIterator[None]:
    """A worker `bad`, registered beside those of the bench, that answers GetModel with the bytes of `answer`."""

    async def get_model(request: bytes, context: Any) -> bytes:
        del request
        return bytes(await answer(context))

    def add(servicer: object, server: grpc.aio.Server) -> None:
        del servicer
        methods = {"GetModel": grpc.unary_unary_rpc_method_handler(get_model)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, methods)])

    health = Health()
    async with serve("127.0.0.1:0", [Service(_SERVICE, add, None)], health=health, drain_seconds=0) as server:
        health.set("", True)
        async with running.registry.register(replace(record_of("bad"), address=server.address)):
            yield


async def problem_of(running: Bench, answer: Answer) -> str:
    """The router's word on the worker once it has the answer. The others must be unharmed."""

    def problem() -> str:
        return next((one.problem for one in running.cluster.workers if one.record.worker_id == "bad"), "")

    async with publishing(running, answer):
        await eventually(lambda: "card cannot be read" in problem())
        stream = await running.generate(prompt="hello", stopping={"max_tokens": 3})
        assert len(stream.token_ids) == 3
        states = {one.worker_id: one.state for one in await running.list_workers()}
        assert states["bad"] == cluster_service_pb2.WORKER_STATE_UNHEALTHY
        assert states["p1"] == states["d1"] == cluster_service_pb2.WORKER_STATE_READY
        return problem()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chat_template": "{{ 1 / 0 }}"}, "ZeroDivisionError"),
        ({"chat_template": "{{ '%(x)s' % {} }}"}, "KeyError"),
        ({"chat_template": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}, "RecursionError"),
        ({"chat_template": "{{" + "(" * 20_000 + ")" * 20_000 + "}}"}, "recursion"),
        ({"chat_template": "{% for x in y %}" * 30 + "{% endfor %}" * 30}, "SyntaxError"),
        ({"chat_template": "{{ unclosed"}, "chat template"),
        ({"tokenizer_config_json": "[]"}, "AttributeError"),
        ({"tokenizer_config_json": "7"}, "AttributeError"),
        ({"chat_template": "", "tokenizer_config_json": '{"chat_template": [{}]}'}, "KeyError"),
        ({"chat_template": "", "tokenizer_config_json": '{"chat_template": 7}'}, "TypeError"),
        ({"tokenizer_config_json": "[" * 100_000}, "RecursionError"),
        ({"tokenizer_json": b"{}"}, "Tokenizer"),
        ({"name": "another"}, "another"),
        ({"embedding": {"max_input_tokens": 8}}, "has no dimensions"),
        ({"embedding": {"dimensions": 8}}, "takes no tokens"),
    ],
)
async def test_a_card_that_cannot_be_used_marks_its_worker_with_the_reason(
    pair: Bench, fields: dict[str, Any], reason: str
) -> None:
    async def answer(context: Any) -> bytes:
        del context
        return card(**fields)

    assert reason in await problem_of(pair, answer)


async def test_an_answer_that_is_no_message_marks_its_worker(pair: Bench) -> None:
    async def answer(context: Any) -> bytes:
        del context
        return b"\xff\xff\xff"

    assert "not a message" in await problem_of(pair, answer)


async def test_a_status_whose_details_are_garbage_marks_its_worker(pair: Bench) -> None:
    garbage = any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")
    status = status_pb2.Status(code=14, message="garbage follows", details=[garbage])

    async def answer(context: Any) -> bytes:
        trailing = (("grpc-status-details-bin", status.SerializeToString()),)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "garbage follows", trailing)
        raise AssertionError("the call goes on after abort")

    assert "garbage follows" in await problem_of(pair, answer)


async def test_a_worker_that_nothing_can_be_dialled_at_marks_itself_only(pair: Bench) -> None:
    async with pair.registry.register(replace(record_of("bad"), address="\0", data_parallel_ranks=3)):
        await eventually(lambda: len(pair.cluster.workers) == 3)
        stream = await pair.generate(prompt="hello", stopping={"max_tokens": 3})
        assert len(stream.token_ids) == 3
