"""Large requests that a router refuses: by how much do they delay the tokens of another client?

A router, simulated workers and an attacker run in processes of their own; this process reads one stream whose workers
make a token every 20 ms. For each payload the attacker sends one request after another. It prints the 99th percentile
of the delays between the stream's tokens, that as a ratio to the one without an attack just before, the longest time
that the router's event loop did nothing else, for how much of it the loop's thread was ready and had no processor, the
most CPU time that it took in one, which other processes do not change, the CPU time of a request, and its answer. What
is left of the longest time, the thread waited for the interpreter.

    python -m benchmarks.large_requests [--seconds 4] [--only NAME ...]
"""

import argparse
import asyncio
import http.client
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import uvloop
from grpc import aio

from baton.inference.v1 import cluster_service_pb2, embed_pb2, generate_pb2, inference_service_pb2_grpc, tokenize_pb2
from baton.kserve import inference_pb2
from benchmarks.processes import child, cpu_nanoseconds, received, run_process, until_told
from discovery.memory import MemoryRegistry
from router.config import OpenAIConfig, RouterConfig
from router.server import host_router
from rpc.channels import open_channel
from runtime.threads import switch_often
from services.config import WorkerConfig
from services.engines.simulated.config import SimulatedConfig
from services.server import host_worker

MIB = 2**20
STEP_SECONDS = 0.02
_PROBE_SECONDS = 0.001
_INFERENCE, _CLUSTER = "/baton.inference.v1.InferenceService/", "/baton.inference.v1.ClusterService/"
_KSERVE = "/inference.GRPCInferenceService/"

Generate = generate_pb2.GenerateRequest


def _generate(request: Generate) -> tuple[str, bytes]:
    return f"{_INFERENCE}Generate", request.SerializeToString()


def _chat(*texts: str) -> Generate:
    return Generate(chat={"messages": [{"role": "user", "parts": [{"text": text} for text in texts]}]})


def _completion(prompt: bytes) -> tuple[str, bytes]:
    return "/v1/completions", b'{"prompt":"' + prompt + b'"}'


def _messages(content: bytes) -> tuple[str, bytes]:
    return "/v1/chat/completions", b'{"messages":[{"role":"user","content":' + content + b"}]}"


def _image(url: bytes) -> bytes:
    return b'[{"type":"image_url","image_url":{"url":"' + url + b'"}}]'


def _kserve(text: bytes) -> tuple[str, bytes]:
    request = inference_pb2.ModelInferRequest(model_name="simulated")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text)
    return f"{_KSERVE}ModelInfer", request.SerializeToString()


_BLOCK = {"type": "text", "text": "x"}
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [_BLOCK]}
_TOOL = {"name": "f", "input_schema": {}}


def _anthropic(blocks: Sequence[object], **fields: object) -> tuple[str, bytes]:
    turns = [{"role": "user", "content": blocks}]
    return "/v1/messages", json.dumps({"model": "simulated", "max_tokens": 1, "messages": turns, **fields}).encode()


def _turns(path: str, field: str, count: int) -> tuple[str, bytes]:
    most = "max_output_tokens" if field == "input" else "max_tokens"
    return path, json.dumps({field: [{"role": "user", "content": "x"}] * count, most: 1}).encode()


def _option(name: bytes, value: bytes) -> tuple[str, bytes]:
    return "/v1/chat/completions", b'{"messages":[{"role":"user","content":"x"}],"' + name + b'":' + value + b"}"


def _large_tool() -> dict[str, object]:
    return {"name": "f", "input_schema": {"type": "object", "properties": {f"p{at}": {} for at in range(30_000)}}}


# By a name, what makes a method or a path and the message or the body.
PAYLOADS: Mapping[str, Callable[[], tuple[str, bytes]]] = {
    "prompt": lambda: _generate(Generate(prompt="word " * (63 * MIB // 5))),
    "prompt of wide characters": lambda: _generate(Generate(prompt="日" * (63 * MIB // 3))),
    "token ids": lambda: _generate(Generate(token_ids={"ids": [1] * (16 * MIB)})),
    "token ids of three bytes": lambda: _generate(Generate(token_ids={"ids": [100_000] * MIB})),
    "token ids, each a field": lambda: (f"{_INFERENCE}Generate", b"\x22\x82\x80\x80\x01" + b"\x08\x01" * (MIB + 1)),
    "chat": lambda: _generate(_chat("word " * (63 * MIB // 5))),
    "chat of many parts": lambda: _generate(_chat(*["word " * 1700] * 7000)),
    "tool": lambda: _generate(Generate(chat={"tools": [{"name": "a", "parameters": "[" * (63 * MIB)}]})),
    "template variable": lambda: _generate(Generate(chat={"template_variables": {"a": "b" * (63 * MIB)}})),
    "stop strings": lambda: _generate(Generate(prompt="a", stopping={"stop": ["b" * 1000] * 60_000})),
    "schema": lambda: _generate(Generate(prompt="a", guided={"json_schema": "[" * (63 * MIB)})),
    "choices": lambda: _generate(Generate(prompt="a", guided={"choice": {"texts": ["b" * 1000] * 60_000}})),
    "image": lambda: _generate(Generate(prompt="<image>", media=[{"data": bytes(63 * MIB), "modality": 1}])),
    "image's address": lambda: _generate(Generate(prompt="<image>", media=[{"uri": "data:" + "A" * (63 * MIB)}])),
    "name": lambda: _generate(Generate(prompt="a", lora_name="b" * (63 * MIB))),
    "request id": lambda: _generate(Generate(prompt="a", request_id="b" * (63 * MIB))),
    "unknown field": lambda: (f"{_INFERENCE}Generate", b"\xfa\x3f\x80\x80\x80\x1f" + bytes(62 * MIB)),
    "Tokenize": lambda: (
        f"{_INFERENCE}Tokenize",
        tokenize_pb2.TokenizeRequest(prompt="word " * (63 * MIB // 5)).SerializeToString(),
    ),
    "Embed": lambda: (
        f"{_INFERENCE}Embed",
        embed_pb2.EmbedRequest(inputs=[{"text": "word " * (63 * MIB // 5)}]).SerializeToString(),
    ),
    "ExplainRoute": lambda: (
        f"{_CLUSTER}ExplainRoute",
        cluster_service_pb2.ExplainRouteRequest(request=Generate(prompt="a" * (63 * MIB))).SerializeToString(),
    ),
    "KServe": lambda: _kserve(b"word " * (63 * MIB // 5)),
    "GetModel": lambda: (f"{_INFERENCE}GetModel", b"\x0a\x80\x80\x80\x1f" + b"a" * (62 * MIB)),
    "HTTP prompt": lambda: _completion(b"word " * (15 * MIB // 5)),
    "HTTP structure in a string": lambda: _completion(rb"\",[" * (15 * MIB // 4)),
    "HTTP escapes": lambda: _completion(rb"\n" * (15 * MIB // 2)),
    "HTTP escaped characters": lambda: _completion(rb"\u00e4" * (15 * MIB // 6)),
    "HTTP pairs of surrogates": lambda: _completion(rb"\ud83d\ude00" * (15 * MIB // 12)),
    "HTTP nesting": lambda: ("/v1/completions", b"[" * (15 * MIB)),
    "HTTP values": lambda: ("/v1/completions", b'{"prompt":[' + b"1," * (7 * MIB) + b"1]}"),
    "HTTP numbers": lambda: ("/v1/completions", b'{"prompt":[' + b"1," * 60_000 + b"1]}"),
    "HTTP spaces": lambda: ("/v1/completions", b'{"prompt":' + b" " * (15 * MIB) + b'"a"}'),
    "HTTP digits": lambda: ("/v1/completions", b'{"prompt":"a","temperature":1.' + b"1" * (15 * MIB) + b"}"),
    "HTTP name": lambda: ("/v1/completions", b'{"' + b"a" * (15 * MIB) + b'":1}'),
    "HTTP strings": lambda: ("/v1/completions", b'{"prompt":["' + b'","'.join([b"a" * 300] * 50_000) + b'"]}'),
    "HTTP string without an end": lambda: ("/v1/completions", b'{"prompt":"' + b"\\\\" * (7 * MIB)),
    "HTTP chat": lambda: _messages(b'"' + b"word " * (15 * MIB // 5) + b'"'),
    "HTTP image": lambda: _messages(_image(b"data:image/png;base64," + b"A" * (15 * MIB))),
    "HTTP image of escapes": lambda: _messages(_image(b"data:" + rb"\/" * (7 * MIB))),
    "HTTP schema": lambda: (
        "/v1/completions",
        b'{"prompt":"a","structured_outputs":{"regex":"' + b"a" * (15 * MIB) + b'"}}',
    ),
    "HTTP response": lambda: ("/v1/responses", b'{"input":"' + rb"\n\"" * (15 * MIB // 4) + b'"}'),
    "HTTP embedding": lambda: ("/v1/embeddings", b'{"input":"' + rb"\n\"" * (15 * MIB // 4) + b'"}'),
    "HTTP blocks": lambda: _anthropic([_BLOCK] * 8000),
    "HTTP too many blocks": lambda: _anthropic([_BLOCK] * 13_000),
    "HTTP tools": lambda: _anthropic([_BLOCK], tools=[_TOOL] * 10_000),
    "HTTP results": lambda: _anthropic([_RESULT] * 4000),
    "HTTP too many results": lambda: _anthropic([_RESULT] * 5000),
    "HTTP wrong fields": lambda: _anthropic([_BLOCK], **{f"x{at}": 1 for at in range(30_000)}),
    "HTTP turns": lambda: _turns("/v1/chat/completions", "messages", 4000),
    "HTTP too many turns": lambda: _turns("/v1/chat/completions", "messages", 9000),
    "HTTP items": lambda: _turns("/v1/responses", "input", 4000),
    "HTTP schema of many values": lambda: _anthropic([_BLOCK], tools=[_large_tool()]),
    "HTTP picture": lambda: ("/v1/images/generations", b'{"prompt":"' + rb"\n\"" * (15 * MIB // 4) + b'"}'),
    "HTTP message": lambda: ("/v1/messages", b'{"max_tokens":1,"system":"' + rb"\n\"" * (15 * MIB // 4) + b'"}'),
    "HTTP options of vLLM": lambda: _option(b"allowed_token_ids", b"[" + b"1," * (7 * MIB) + b"1]"),
    "HTTP biases": lambda: _option(b"logit_bias", b"{" + b",".join(b'"%d":1' % at for at in range(MIB)) + b"}"),
    "HTTP bad words": lambda: _option(b"bad_words", b"[" + b'"a",' * (3 * MIB) + b'"a"]'),
    "HTTP variables": lambda: _option(b"chat_template_kwargs", b'{"a":"' + b"b" * (15 * MIB) + b'"}'),
    "HTTP embeddings": lambda: ("/v1/embeddings", b'{"input":["' + b'","'.join([b"word " * 1500] * 2000) + b'"]}'),
}


def run_workers(pipe: Connection) -> None:
    """Serves both roles until the pipe ends."""

    async def serve() -> None:
        registry = MemoryRegistry("benchmark")
        async with AsyncExitStack() as stack:
            for role in ("prefill", "decode", "embed"):
                engine = SimulatedConfig(model="models/demo", image_tokens=16, decode_step_seconds=STEP_SECONDS)
                config = WorkerConfig(worker_id=role, roles=(role,), engine=engine, transports=("shm",))  # type: ignore[arg-type]
                await stack.enter_async_context(host_worker(config, registry))
            pipe.send(registry.workers())
            await until_told(pipe)

    run_process(serve)


def run_router(pipe: Connection) -> None:
    """A router to the workers whose records come first. Answers each message with the longest hold since the last one,
    with how much of it had no processor, and with the most CPU time of one.
    """

    switch_often()

    async def serve() -> None:
        config = RouterConfig(listen="127.0.0.1:0", openai=OpenAIConfig(listen="127.0.0.1:0"), drain_seconds=0)
        registry = MemoryRegistry("benchmark")
        async with AsyncExitStack() as stack:
            for record in pipe.recv():
                await stack.enter_async_context(registry.register(record))
            router = await stack.enter_async_context(host_router(config, registry))
            while sum(not worker.problem for worker in router.cluster.workers) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            pipe.send((router.address, router.openai_address))
            longest, most = (0.0, 0.0), 0.0
            while True:
                before, cpu, ready = time.perf_counter(), time.thread_time(), ready_seconds()
                await asyncio.sleep(_PROBE_SECONDS)
                longest = max(longest, (time.perf_counter() - before - _PROBE_SECONDS, ready_seconds() - ready))
                most = max(most, time.thread_time() - cpu)
                if pipe.poll():
                    if pipe.recv() == "stop":
                        return
                    pipe.send((*longest, most))
                    longest, most = (0.0, 0.0), 0.0

    run_process(serve)


def ready_seconds() -> float:
    """The time so far for which this thread was ready to run, and had no processor. Of Linux."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def run_attacker(pipe: Connection) -> None:
    """Sends what the pipe names, one after another for so many seconds, and answers how often, and with what result."""
    address, openai_address = pipe.recv()
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options) as channel:
        while (asked := pipe.recv()) != "stop":
            name, seconds = asked
            target, payload = PAYLOADS[name]()
            pipe.send("ready")
            pipe.recv()
            end, count, answer = time.monotonic() + seconds, 0, ""
            while time.monotonic() < end:
                is_http = target.startswith("/v1/")
                answer = _post(openai_address, target, payload) if is_http else _call(channel, target, payload)
                count += 1
            pipe.send((count, answer))


def _call(channel: grpc.Channel, method: str, payload: bytes) -> str:
    try:
        if method.endswith("/Generate"):
            for _ in channel.unary_stream(method)(payload, timeout=60):
                pass
        else:
            channel.unary_unary(method)(payload, timeout=60)
    except grpc.RpcError as error:
        return f"{error.code().name} {error.details()}"  # type: ignore[attr-defined]
    return "OK"


def _post(address: str, path: str, body: bytes) -> str:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return f"{response.status} {response.read(300).decode(errors='replace')}"
    except OSError as error:
        return str(error)
    finally:
        connection.close()


@dataclass(slots=True)
class Bystander:
    """A stream of tokens, and the delays between them since they were last asked for, in seconds."""

    delays: list[float]

    async def read(self, stub: inference_service_pb2_grpc.InferenceServiceStub) -> None:
        while True:
            request = Generate(prompt="hello", stopping={"max_tokens": 1500, "ignore_eos": True})
            before = 0.0
            # A failed stream is a long delay.
            with suppress(aio.AioRpcError):
                async for message in stub.Generate(request):
                    if message.HasField("token"):
                        now = time.perf_counter()
                        if before:
                            self.delays.append(now - before)
                        before = now

    def p99_milliseconds(self) -> float:
        """The 99th percentile; forgets the delays."""
        found, self.delays = sorted(self.delays), []
        return 1e3 * found[len(found) * 99 // 100] if found else float("inf")


@asynccontextmanager
async def bystander(stub: inference_service_pb2_grpc.InferenceServiceStub) -> AsyncIterator[Bystander]:
    made = Bystander([])
    reading = asyncio.create_task(made.read(stub))
    try:
        yield made
    finally:
        reading.cancel()


async def measure(names: Sequence[str], seconds: float) -> None:
    async with AsyncExitStack() as stack:
        workers, _ = await stack.enter_async_context(child(run_workers))
        router, pid = await stack.enter_async_context(child(run_router))
        router.send(await received(workers))
        address, openai_address = await received(router)
        attacker, _ = await stack.enter_async_context(child(run_attacker))
        attacker.send((address, openai_address))
        channel = await stack.enter_async_context(open_channel(address))
        stream = await stack.enter_async_context(bystander(inference_service_pb2_grpc.InferenceServiceStub(channel)))
        await asyncio.sleep(2.0)
        holds = "longest hold ms", "of it without a processor", "CPU ms of a hold"
        columns = ("payload", "p99 ms", "ratio", *holds, "CPU ms a request", "answer")
        print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        for name in names:
            attacker.send((name, seconds))
            await received(attacker)
            stream.p99_milliseconds()
            await asyncio.sleep(seconds)
            quiet = stream.p99_milliseconds()
            router.send("hold")
            await received(router)
            before = cpu_nanoseconds(pid)
            attacker.send("go")
            count, answer = await received(attacker)
            attacked = stream.p99_milliseconds()
            cpu = (cpu_nanoseconds(pid) - before) / 1e6 / count
            router.send("hold")
            found = [f"{1e3 * each:.1f}" for each in await received(router)]
            cells = [name, f"{attacked:.0f}", f"{attacked / quiet:.2f}", *found, f"{cpu:.0f}", answer[:100]]
            print(f"| {' | '.join(cells)} |".replace("\n", " "), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", nargs="+", choices=PAYLOADS, default=list(PAYLOADS), metavar="NAME")
    arguments = parser.parse_args()
    uvloop.run(measure(arguments.only, arguments.seconds))


if __name__ == "__main__":
    main()
