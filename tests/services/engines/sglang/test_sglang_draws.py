"""The tokens that a draw of SGLang chooses from, in the vocabulary's order."""

import pytest
import torch

from services.engines.sglang.inside.draws import kept

ALL = 1 << 30  # SGLang's word for no top-k


def _expected(probs: list[float], top_k: int, top_p: float) -> list[float]:
    before, expected = 0.0, [0.0] * len(probs)
    for rank, token in enumerate(sorted(range(len(probs)), key=lambda each: -probs[each])):
        if rank < top_k and (before <= top_p or top_p >= 1):
            expected[token] = probs[token]
        before += probs[token]
    return expected


@pytest.mark.parametrize(("top_k", "top_p"), [(ALL, 1.0), (1, 1.0), (7, 1.0), (ALL, 0.5), (20, 0.3), (ALL, 0.0)])
def test_tokens_beyond_top_k_and_top_p_have_no_part_in_a_draw(top_k: int, top_p: float) -> None:
    torch.manual_seed(3)
    probs = torch.softmax(torch.randn(5, 97).bfloat16().float(), dim=-1)  # some are equal
    found = kept(probs, torch.tensor([top_k] * 5), torch.tensor([top_p] * 5))
    assert found.tolist() == [_expected(row, top_k, top_p) for row in probs.tolist()]


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    probs = torch.softmax(torch.randn(3, 97), dim=-1)
    together = kept(probs, torch.tensor([ALL, 1, 9]), torch.tensor([1.0, 1.0, 0.4]))
    assert torch.equal(together[0], probs[0])
    assert together[1].nonzero().tolist() == [[int(probs[1].argmax())]]
