"""NVIDIA Dynamo's frontend, before prefill and decode workers of its own: its mocker, which computes nothing.

The mocker is a program of Dynamo's, and its speed is its own: it is given the step time of the other engines, but its
first token is a step of its own, so its TTFT is not comparable. Its HTTP port and the ports for requests and answers
are on loopback; its event sockets (ZeroMQ) bind all interfaces, whatever is set.
"""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import numpy

from benchmarks.peers.clients.load import STEP_SECONDS
from benchmarks.peers.cores import Cores, running
from benchmarks.peers.environments import DYNAMO

# The mocker's ids are from 1000 to 2000. They have to have texts, or no event is sent for a token.
_VOCABULARY: Final = 2304
_MAX_STREAMS: Final = 1024


@asynccontextmanager
async def dynamo(folder: Path, port: int, cores: Cores, log: Path) -> AsyncIterator[int]:
    """The frontend's process id; it may take seconds until it serves all models."""
    home = (folder / "dynamo-run").absolute()
    shutil.rmtree(home, ignore_errors=True)
    model = _write_model(home / "model")
    environment = {
        "HOME": str(home),
        "DYN_FILE_KV": str(home / "discovery"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_SELF_HOST_METADATA": "0",
        "HF_HUB_OFFLINE": "1",
        # As the others: a log line for each request.
        "DYN_LOG": "info",
    }
    python = str(DYNAMO.python(folder).absolute())
    async with AsyncExitStack() as stack:
        for words in _workers(home, model):
            command = [python, "-m", "dynamo.mocker", *words, "--discovery-backend", "file"]
            await stack.enter_async_context(running(command, log, cores.others, environment))
        frontend = [python, "-m", "dynamo.frontend", "--discovery-backend", "file", "--http-host", "127.0.0.1"]
        command = [*frontend, "--http-port", str(port)]
        process = await stack.enter_async_context(running(command, log, cores.router, environment))
        yield process.pid


def _workers(home: Path, model: Path) -> Iterator[list[str]]:
    """The options of the prefill and the decode worker of each model."""
    for name, step_seconds in STEP_SECONDS.items():
        common = ["--model-path", str(model), "--model-name", name, "--max-num-seqs", str(_MAX_STREAMS)]
        common += ["--kv-transfer-bandwidth", "0"]
        at_once = ["--speedup-ratio", "0"]
        pace = ["--planner-profile-data", str(_write_pace(home, name, step_seconds))] if step_seconds else at_once
        yield [*common, *at_once, "--disaggregation-mode", "prefill", "--endpoint", f"dyn://{name}.prefill.generate"]
        yield [*common, *pace, "--disaggregation-mode", "decode", "--endpoint", f"dyn://{name}.backend.generate"]


def _write_pace(home: Path, name: str, step_seconds: float) -> Path:
    """A table of measured times, in the mocker's format: prompts take none, and each step takes the same."""
    path = home / f"{name}.npz"
    tokens, contexts = numpy.linspace(0, 1e7, 10), numpy.linspace(1, 4096, 10)
    numpy.savez(
        path,
        prefill_isl=numpy.array([1.0, 4096.0]),
        prefill_ttft_ms=numpy.zeros(2),
        decode_active_kv_tokens=tokens,
        decode_context_length=contexts,
        decode_itl=numpy.full((len(tokens), len(contexts)), step_seconds * 1e3),
    )
    return path


def _write_model(folder: Path) -> Path:
    """A folder with a tokenizer of one token a byte, as the simulated model of Baton's workers has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {f"w{index}": index for index in range(len(vocabulary), _VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token_id": _VOCABULARY, "eos_token_id": _VOCABULARY}
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"vocab_size": _VOCABULARY + 1, "max_position_embeddings": 4096, "intermediate_size": 64}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape, **sizes, **special}
    (folder / "config.json").write_text(json.dumps(config))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder
