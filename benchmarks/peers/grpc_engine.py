"""The workers of smg's way by gRPC: vLLM's engine as smg's protocol has it, whose answers are ready-made.

    python -m benchmarks.peers.grpc_engine prefill|decode PORT STEPS STUBS MODEL

A request streams `max_tokens` tokens, the first of them at once, and the others with all streams of its speed, which
its seed numbers in the order of STEP_SECONDS: smg tells an engine nothing else of what the client has asked for.
Prefill answers whole. STUBS is the folder that has the package smg_grpc_proto, MODEL that of the tokenizer. The times
of the steps are appended to the file STEPS.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.peers.clients.load import FLAT, PACED, STEP_SECONDS
from benchmarks.peers.clients.steps import StepLog

_SPEEDS = tuple(STEP_SECONDS)
_CONTEXT_TOKENS = 131_072


def write_tokenizer(folder: Path) -> None:
    """Writes one that has a token for each byte, as Baton's workers here."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")


class Steps:
    """The steps of one speed: all that wait for the next one go on at the same instant."""

    def __init__(self, step_seconds: float, log: StepLog) -> None:
        self._step_seconds = step_seconds
        self._log = log
        self._waiting: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()

    async def next(self) -> None:
        """Waits for the next step."""
        step = asyncio.get_running_loop().create_future()
        self._waiting.append(step)
        self._wake.set()
        await step

    async def run(self) -> None:
        """Steps for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self._wake.wait()
            due = max(due + self._step_seconds, loop.time())
            await asyncio.sleep(max(0.0, due - loop.time()))
            waiting, self._waiting = self._waiting, []
            self._wake.clear()
            if self._step_seconds:
                self._log.note()
            for step in waiting:
                if not step.done():
                    step.set_result(None)


class Engine:
    """Answers what smg asks: `stubs` are the protocol's messages."""

    def __init__(self, role: str, model: str, stubs: Any, steps: Mapping[str, Steps]) -> None:
        self._role = role
        self._model = model
        self._stubs = stubs
        self._steps = steps
        token = stubs.GenerateResponse(chunk=stubs.GenerateStreamChunk(token_ids=[64], completion_tokens=1))
        self._token = token.SerializeToString()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Of the methods that are served; smg does without the others."""
        found = {
            "Generate": grpc.unary_stream_rpc_method_handler(self._generate, self._stubs.GenerateRequest.FromString)
        }
        for name, answer in self._facts().items():
            answers = self._answering(answer.SerializeToString())
            found[name] = grpc.unary_unary_rpc_method_handler(answers)
        return grpc.method_handlers_generic_handler("vllm.grpc.engine.VllmEngine", found)

    async def _generate(self, request: Any, _context: object) -> AsyncIterator[bytes]:
        asked = request.sampling_params
        tokens = asked.max_tokens if self._role == "decode" else 1
        steps = self._steps[_SPEEDS[asked.seed] if asked.HasField("seed") else FLAT]
        if request.stream:
            yield self._token
            for _ in range(tokens - 1):
                await steps.next()
                yield self._token
        whole = self._stubs.GenerateComplete(
            output_ids=[64] * tokens,
            finish_reason="length",
            prompt_tokens=len(request.tokenized.input_ids),
            completion_tokens=tokens,
            kv_transfer_params_json="{}",
        )
        yield self._stubs.GenerateResponse(complete=whole).SerializeToString()

    def _facts(self) -> dict[str, Any]:
        stubs = self._stubs
        model = stubs.GetModelInfoResponse(
            model_path=self._model,
            tokenizer_path=self._model,
            served_model_name=PACED,
            is_generation=True,
            max_context_length=_CONTEXT_TOKENS,
            max_req_input_len=_CONTEXT_TOKENS,
            vocab_size=256,
        )
        server = stubs.GetServerInfoResponse(
            server_type="vllm-grpc", kv_connector="NixlConnector", kv_role="kv_both", kv_engine_id=self._role
        )
        server.data_parallel_size, server.block_size = 1, 16
        return {
            "HealthCheck": stubs.HealthCheckResponse(healthy=True),
            "GetModelInfo": model,
            "GetServerInfo": server,
            "GetLoads": stubs.GetLoadsResponse(dp_rank_count=1, loads=[stubs.SchedulerLoad()]),
            "Abort": stubs.AbortResponse(),
        }

    @staticmethod
    def _answering(content: bytes) -> Any:
        async def answer(_request: bytes, _context: object) -> bytes:
            return content

        return answer


async def main(role: str, port: int, steps: Path, stubs: Path, model: str) -> None:
    sys.path.append(str(stubs))
    log = StepLog(steps)
    speeds = {name: Steps(seconds, log) for name, seconds in STEP_SECONDS.items()}
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    engine = Engine(role, model, import_module("smg_grpc_proto.generated.vllm_engine_pb2"), speeds)
    server.add_generic_rpc_handlers((engine.handlers(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.gather(server.wait_for_termination(), *(each.run() for each in speeds.values()))


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]))
