"""Vectors of texts are those of transformers' own models, whatever else is in the batch."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch
from support.engines.checkpoints import (
    DEMO,
    save_bert,
    save_qwen3,
    save_roberta,
    write_sentence_transformers_files,
)
from transformers import AutoModel, AutoModelForImageTextToText

from baton.errors import ConfigError, Overloaded
from services.engines.base import Vector
from services.engines.pytorch.config import PyTorchConfig
from services.engines.pytorch.embedding.embedder import PyTorchEmbedder

TEXTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [17], [20, 21, 22, 23, 24]]


def embedder(folder: Path, **options: object) -> PyTorchEmbedder:
    return PyTorchEmbedder(PyTorchConfig.model_validate({"model": folder, "device": "cpu", "threads": 1, **options}))


def states(folder: Path, text: Sequence[int]) -> torch.Tensor:
    """The states of a text's tokens in the plain library: one text, no padding."""
    if folder == DEMO:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model.language_model
    else:
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model.eval()(input_ids=torch.tensor([list(text)])).last_hidden_state[0]


def assert_close(found: Sequence[Vector], expected: Sequence[torch.Tensor]) -> None:
    for one, reference in zip(found, expected, strict=True):
        numpy.testing.assert_allclose(one, reference.numpy(), rtol=2e-4, atol=2e-5)


async def test_a_decoder_gives_the_state_of_the_last_token() -> None:
    async with embedder(DEMO) as running:
        assert running.facts.embedding is not None
        assert (running.facts.embedding.pooling, running.facts.embedding.normalize) == ("last", True)
        found = await running.embed(TEXTS)
    assert_close(found, [states(DEMO, text)[-1] for text in TEXTS])


async def test_a_decoder_can_be_configured_to_give_the_mean(tmp_path: Path) -> None:
    folder = save_qwen3(tmp_path)
    async with embedder(folder, pooling="mean") as running:
        found = await running.embed(TEXTS)
    assert_close(found, [states(folder, text).mean(0) for text in TEXTS])


@pytest.mark.parametrize("save", [save_bert, save_roberta])
async def test_a_model_like_bert_gives_the_mean_without_files_that_say_otherwise(save: object, tmp_path: Path) -> None:
    folder = save(tmp_path)  # type: ignore[operator]
    async with embedder(folder) as running:
        facts = running.facts
        found = await running.embed(TEXTS)
    assert facts.embedding is not None
    assert facts.embeddings_only
    # RoBERTa's positions begin after the id of padding, 0.
    assert facts.embedding.max_input_tokens == (64 if save is save_bert else 63)
    assert_close(found, [states(folder, text).mean(0) for text in TEXTS])


async def test_sentence_transformers_files_decide(tmp_path: Path) -> None:
    modes = ("pooling_mode_max_tokens", "pooling_mode_cls_token")
    folder = write_sentence_transformers_files(save_bert(tmp_path), *modes, normalizes=False, max_tokens=32)
    async with embedder(folder) as running:
        rules = running.facts.embedding
        found = await running.embed(TEXTS)
    assert rules is not None
    assert (rules.pooling, rules.normalize, rules.max_input_tokens, rules.dimensions) == ("cls+max", False, 32, 192)
    own = [states(folder, text) for text in TEXTS]
    assert_close(found, [torch.cat([one[0], one.amax(0)]) for one in own])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("pooling_mode_lasttoken", lambda own: own[-1]),
        ("pooling_mode_mean_sqrt_len_tokens", lambda own: own.sum(0) / len(own) ** 0.5),
        (
            "pooling_mode_weightedmean_tokens",
            lambda own: (own * torch.arange(1, len(own) + 1)[:, None]).sum(0) / sum(range(1, len(own) + 1)),
        ),
    ],
)
async def test_each_pooling_is_its_formula(mode: str, expected: object, tmp_path: Path) -> None:
    folder = write_sentence_transformers_files(save_bert(tmp_path), mode, normalizes=True, max_tokens=64)
    async with embedder(folder) as running:
        found = await running.embed(TEXTS)
    assert_close(found, [expected(states(folder, text)) for text in TEXTS])  # type: ignore[operator]


async def test_modules_that_are_not_supported_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_bert(tmp_path)
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="Dense"):
        await embedder(folder).__aenter__()


async def test_calls_that_wait_run_in_one_step(tmp_path: Path) -> None:
    async with embedder(save_bert(tmp_path)) as running:
        before = running.steps
        # More calls than the first step can take: they wait while it runs, and then run together.
        found = await asyncio.gather(*(running.embed([text]) for text in TEXTS * 8))
        steps = running.steps - before
        assert_close([one for [one] in found[:4]], [torch.tensor(one) for [one] in found[4:8]])
    assert steps < len(TEXTS) * 8


async def test_a_step_has_no_more_tokens_than_configured(tmp_path: Path) -> None:
    folder = save_bert(tmp_path)
    async with embedder(folder, max_step_tokens=20, max_sequences=1) as running:
        found = await running.embed(TEXTS)
        # By length 1, 3, 5 (15 tokens with padding), and then 9.
        assert running.steps == 2
    assert_close(found, [states(folder, text).mean(0) for text in TEXTS])


async def test_more_calls_than_may_wait_are_refused(tmp_path: Path) -> None:
    async with embedder(save_bert(tmp_path), max_waiting=1) as running:
        first = asyncio.ensure_future(running.embed(TEXTS))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await running.embed(TEXTS)
        assert len(await first) == len(TEXTS)
    assert running.load().running == running.load().waiting == 0
