"""Vectors of checkpoints through a router: text to tokens to the model, equal to the plain library's."""

from array import array
from pathlib import Path

import pytest
import torch
from support.clients.kserve_call import infer, text_request
from support.clients.openai_api import client_of, openai_bench
from support.cluster.demo import demo_worker
from support.cluster.in_process import PATIENT, bench
from support.engines.checkpoints import DEMO, save_bert
from transformers import AutoModel, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

from baton.calls import unary
from baton.errors import BatonError
from baton.inference.v1 import embed_pb2, generate_pb2
from services.config import WorkerConfig
from services.engines.pytorch.config import PyTorchConfig

TEXTS = ["Sort: pear apple mango", "a circle", "x"]


def unit(vector: torch.Tensor) -> list[float]:
    values: list[float] = (vector / vector.norm()).tolist()
    return values


@pytest.mark.feature("embeddings of texts", engine="pytorch", facade="grpc")
@pytest.mark.feature("embeddings of texts", engine="pytorch", facade="openai")
async def test_the_demonstrations_vectors_are_its_last_states() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForImageTextToText.from_pretrained(DEMO, dtype=torch.float32).eval().model.language_model
    with torch.inference_mode():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in TEXTS]
    async with openai_bench(demo_worker("embed")) as running:
        request = embed_pb2.EmbedRequest(inputs=[{"text": text} for text in TEXTS])
        response = await unary(running.stub.Embed(request, timeout=60))
        answer = await client_of(running).embeddings.create(model="demo", input=TEXTS)
    for state, found, same in zip(states, response.embeddings, answer.data, strict=True):
        assert list(found.values) == pytest.approx(unit(state), abs=1e-4)
        assert same.embedding == pytest.approx(list(found.values), abs=1e-6)


@pytest.mark.feature("embeddings of a model like BERT", engine="pytorch", facade="grpc")
@pytest.mark.feature("embeddings of a model like BERT", engine="pytorch", facade="kserve")
async def test_a_model_like_bert_has_the_mean_of_its_states_and_generates_nothing(tmp_path: Path) -> None:
    folder = save_bert(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
        states = [model(input_ids=one).last_hidden_state[0].mean(0) for one in ids]
    engine = PyTorchConfig(model=folder, name="bert", device="cpu", threads=1)
    async with bench(WorkerConfig(worker_id="e1", roles=("embed",), engine=engine), router=PATIENT) as running:
        request = embed_pb2.EmbedRequest(inputs=[{"text": text} for text in TEXTS])
        response = await unary(running.stub.Embed(request, timeout=60))
        generation = generate_pb2.GenerateUnaryRequest(request={"prompt": "x"})
        with pytest.raises(BatonError, match="generation") as refused:
            await unary(running.stub.GenerateUnary(generation, timeout=60))
        # By KServe it has no other output, which then need not be named.
        tensor = await infer(running.address, text_request(*TEXTS, model="bert"))
    for state, found in zip(states, response.embeddings, strict=True):
        assert list(found.values) == pytest.approx(unit(state), abs=1e-4)
    assert tensor.outputs[0].shape == [len(TEXTS), len(response.embeddings[0].values)]
    assert tensor.raw_output_contents[0] == b"".join(array("f", one.values).tobytes() for one in response.embeddings)
    # <s> and </s> count.
    assert response.embeddings[2].num_tokens == 3
    assert refused.value.reason == "UNSUPPORTED"
