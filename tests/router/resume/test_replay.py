"""The text of an answer that is replayed and cut: whatever came together before and after the cut, it is the same."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from baton.engine.v1 import prompt_pb2
from baton.errors import PositionInvalid
from baton.inference.v1 import generate_pb2, model_pb2
from router.resume.handle import Handle, answer_call_id
from router.resume.replay import ReplayedCompletion
from router.text.completion import Completion
from router.text.parsing.registry import AnswerParser, format_of
from router.text.served_model import ServedModel
from router.text.tokenizer import Tokenizer

_DEMO = Path(__file__).parents[3] / "models/demo"
_TRIALS = 2000

Part = TypeVar("Part")


def _served(tokenizer: bytes) -> ServedModel:
    config, template = (_DEMO / "tokenizer_config.json").read_text(), (_DEMO / "chat_template.jinja").read_text()
    read = Tokenizer(tokenizer, config, template)
    return ServedModel("demo", model_pb2.ModelLimits(), model_pb2.ModelCapabilities(), frozenset(), read)


def _of_bytes() -> bytes:
    """A vocabulary in which every byte is a token: characters of several tokens, and bytes that form none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Library(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    made.decoder, made.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    text: str = made.to_str()
    return text.encode()


@pytest.fixture(scope="module", params=["demo", "bytes"])
def model(request: pytest.FixtureRequest) -> ServedModel:
    return _served((_DEMO / "tokenizer.json").read_bytes() if request.param == "demo" else _of_bytes())


def _divided(ids: Sequence[int], chosen: random.Random) -> Iterator[Sequence[int]]:
    at = 0
    while at < len(ids):
        count = chosen.choice((1, 1, 1, 2, 3, 7, 20))
        yield ids[at : at + count]
        at += count


def _ids(model: ServedModel, chosen: random.Random) -> list[int]:
    assert model.tokenizer is not None
    library = Library.from_str(_of_bytes().decode())
    if model.tokenizer.longest_token < 8 and chosen.random() < 0.5:
        found: list[int] = library.encode("aé漢😀 z" * 9).ids[: chosen.randrange(1, 80)]
        return found
    return [chosen.randrange(5, 200) for _ in range(chosen.randrange(1, 80))]


def test_whatever_came_together_the_cut_text_is_the_rest(model: ServedModel) -> None:
    assert model.tokenizer is not None
    chosen = random.Random(3)
    for trial in range(_TRIALS):
        ids = _ids(model, chosen)
        request, sampling = generate_pb2.GenerateRequest(), prompt_pb2.Sampling()
        sampling.stop.max_tokens = len(ids)
        text = model.tokenizer.decode(ids)
        if trial % 3 == 0 and len(text) > 4:
            start = chosen.randrange(len(text) - 2)
            request.stopping.stop.append(text[start : start + chosen.randrange(1, 3)])
        whole = Completion(request, sampling, model)
        expected, seen, upto = "", [], 0
        for piece in _divided(ids, chosen):
            expected += whole.push(piece, ()).text
            seen.append((len(whole.token_ids), len(expected.encode())))
            if whole.finished:
                break
        expected += whole.flush().text
        tokens, text_bytes = ([(0, 0), *seen])[chosen.randrange(len(seen) + 1)]
        have = generate_pb2.AnswerPosition(tokens=tokens, text_bytes=text_bytes)
        upto = chosen.randrange(tokens, len(whole.token_ids) + 1)
        replayed = ReplayedCompletion(request, sampling, model, None, have)
        replayed.replay(whole.token_ids[:upto])
        rest, new = replayed.missing.text, list(replayed.missing.token_ids)
        for piece in _divided(whole.token_ids[upto:], chosen):
            if replayed.finished:
                break
            if len(piece) == 1 and not request.stopping.stop:
                rest, new = rest + replayed.push_token(piece[0]), [*new, piece[0]]
                continue
            delta = replayed.push(piece, ())
            rest, new = rest + delta.text, [*new, *delta.token_ids]
        rest += replayed.flush().text
        assert expected.encode()[:text_bytes] + rest.encode() == expected.encode()
        assert new == whole.token_ids[tokens:]


@pytest.mark.parametrize("field", ["text_bytes", "reasoning_bytes", "tool_calls"])
def test_a_client_that_claims_more_than_the_whole_answer_is_told_so(model: ServedModel, field: str) -> None:
    assert model.tokenizer is not None
    chosen = random.Random(6)
    for _ in range(20):
        ids = _ids(model, chosen)
        sampling = prompt_pb2.Sampling()
        sampling.stop.max_tokens = len(ids)
        has = {"tokens": chosen.randrange(len(ids) + 1), field: len(model.tokenizer.decode(ids).encode()) + 1}
        replayed = ReplayedCompletion(
            generate_pb2.GenerateRequest(), sampling, model, None, generate_pb2.AnswerPosition(**has)
        )
        replayed.replay(ids)
        assert replayed.finished is not None
        with pytest.raises(PositionInvalid, match=f"have.{field}: is .* more than the answer has"):
            replayed.flush()


def test_ids_that_come_together_stop_where_they_stop_one_by_one(model: ServedModel) -> None:
    assert model.tokenizer is not None
    chosen, stopped = random.Random(4), 0
    for _ in range(_TRIALS):
        ids = _ids(model, chosen)
        request, sampling = generate_pb2.GenerateRequest(), prompt_pb2.Sampling()
        request.stopping.include_stop = chosen.random() < 0.5
        sampling.stop.max_tokens, sampling.stop.min_tokens = len(ids), chosen.choice((0, 0, len(ids) // 2))
        text = model.tokenizer.decode(ids)
        starts = [chosen.randrange(max(1, len(text) - 2)) for _ in range(2)]
        request.stopping.stop.extend(text[start : start + chosen.randrange(1, 4)] or "x" for start in starts)
        together, alone = Completion(request, sampling, model), Completion(request, sampling, model)
        sent = "".join(together.push(piece, ()).text for piece in _until_finished(together, _divided(ids, chosen)))
        alone_sent = "".join(alone.push([one], ()).text for one in _until_finished(alone, ids))
        assert (sent, together.token_ids, together.finished) == (alone_sent, alone.token_ids, alone.finished)
        assert together.flush().text == alone.flush().text
        stopped += together.finished is not None and bool(together.finished.stop_string)
    assert 0.3 * _TRIALS < stopped < _TRIALS


def _until_finished(completion: Completion, parts: Iterable[Part]) -> Iterator[Part]:
    return itertools.takewhile(lambda _part: completion.finished is None, parts)


def test_more_tokens_than_are_known_are_refused(model: ServedModel) -> None:
    sampling = prompt_pb2.Sampling()
    sampling.stop.max_tokens = 9
    have = generate_pb2.AnswerPosition(tokens=3)
    with pytest.raises(PositionInvalid):
        ReplayedCompletion(generate_pb2.GenerateRequest(), sampling, model, None, have).replay([5, 6])


def test_the_ids_of_tool_calls_follow_from_the_answer() -> None:
    form = format_of("<tool_call>")
    assert form is not None
    text = '<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>' * 2

    def ids(call_id: str, *cuts: int) -> list[str]:
        parser = AnswerParser(None, form, ["weather"], call_id=call_id)
        edges = [0, *cuts, len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
        calls = [call.id for piece in pieces for call in parser.push(piece).tool_calls]
        return calls + [call.id for call in parser.flush().tool_calls]

    assert ids("a") == ids("a", 5, 40, 90)
    assert len(set(ids("a") + ids("b"))) == 4


def test_a_handle_is_51_characters_and_is_read_back() -> None:
    handle = Handle.new("ab" * 16).at("decode-0")
    assert len(handle.text) == 51
    assert Handle.parse(handle.text) == handle
    assert (handle.hints_at("decode-0"), handle.hints_at("decode-1")) == (True, False)
    assert answer_call_id(handle.call_id, 0) == handle.call_id
    assert len({answer_call_id(handle.call_id, answer) for answer in range(16)}) == 16
