"""The masks of a step, computed in a thread while the model runs, and applied to its logits."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
from llguidance import LLExecutor

from services.engines.pytorch.guidance.guidance import Guidance, Words


class MaskThread:
    """Computes the masks of the next tokens while the model computes their logits. The thread starts at first use."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")

    def begin(self, guided: Sequence[Guidance]) -> None:
        """Begins the masks of a step; `Guidance.mask` waits for them."""
        if guided:
            job = self._thread.submit(self._compute, guided)
            for one in guided:
                one.expect(job)

    def _compute(self, guided: Sequence[Guidance]) -> None:
        able = [one for one in guided if one.catch_up(self._executor)]
        if not able:
            return
        masks = np.zeros((len(able), able[0].words.size), dtype=np.uint32)
        rows = [(one.matcher, row) for row, one in enumerate(able)]
        # In parallel, without the interpreter's lock.
        self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(able))
        for one, words in zip(able, masks, strict=True):
            if one.matcher.is_error():
                one.fail(one.matcher.get_error())
            one.words = words

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()


def apply_masks(logits: torch.Tensor, masks: Mapping[int, Words]) -> None:
    """Excludes, in place, what the masks of rows do not allow in `logits` `[rows, vocabulary]`."""
    if not masks:
        return
    packed = torch.from_numpy(np.stack(list(masks.values())).view(np.uint8)).to(logits.device)
    rows = torch.tensor(list(masks), device=logits.device)
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits.device)
    is_banned = (packed.unsqueeze(-1) & bits).view(len(masks), -1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(is_banned, -torch.inf)
