"""The Triton kernel's digests equal those of plain PyTorch: on a GPU, or on a CPU in Triton's interpreter."""

import os
from importlib.util import find_spec

import pytest
import torch
from support.engines.device import DEVICE

from services.engines.pytorch.kv_cache.digester import Digester

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="Triton is not installed, or there is neither a GPU nor TRITON_INTERPRET=1",
)


@pytest.mark.parametrize("words", [96, 8192, 20_000])
def test_digests_are_those_of_pytorch(words: int) -> None:
    from services.engines.pytorch.kernels.digest_kernels import digest_blocks

    pool = torch.randint(-(2**31), 2**31, (7, words), dtype=torch.int64, device=DEVICE).to(torch.int32)
    expected = Digester(4 * words, torch.device("cpu")).digest(pool.cpu(), [5, 1, 6])
    weights = Digester(4 * words, torch.device("cpu"))._weights.to(DEVICE)
    found = digest_blocks(pool, torch.tensor([5, 1, 6], device=DEVICE), weights)
    assert found.tolist() == expected.tolist()
