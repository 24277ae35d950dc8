"""The masks of a step, computed in a thread while the model runs, and applied to its logits."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
from llguidance import LLExecutor

from services.engines.pytorch.guidance.guidance import SLOW_SECONDS, Guidance, Words

_SECONDS_PER_MASK = 0.002  # of a step of many


class MaskThreads:
    """Computes the masks of the next tokens while the model computes their logits. Threads start at first use.

    A grammar whose masks are slow, such as an ambiguous one, must not hold up the steps of others: its masks are
    computed in a thread of their own, one request after the other, and its request is in no step until they are ready.
    """

    def __init__(self) -> None:
        self._steps = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._slow = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slow-masks")

    def begin(self, guided: Sequence[Guidance]) -> None:
        """Begins the masks of a step; `Guidance.mask` waits for them."""
        quick = [one for one in guided if one.compute_alone is None]
        if quick:
            job = self._steps.submit(self._compute, quick)
            for one in quick:
                one.expect(job)

    def _compute(self, guided: Sequence[Guidance]) -> None:
        together, suspects = [one for one in guided if not one.is_suspect], [one for one in guided if one.is_suspect]
        began = time.monotonic()
        _compute_masks(together, self._executor)
        is_slow = time.monotonic() - began > SLOW_SECONDS + len(together) * _SECONDS_PER_MASK
        # Times are not known by request: the next masks tell, each by itself.
        for one in together:
            one.is_suspect = is_slow
        for one in suspects:
            self._compute_one(one, self._executor)

    def _begin_alone(self, one: Guidance) -> "Future[None]":
        return self._slow.submit(self._compute_one, one, self._slow_executor)

    def _compute_one(self, one: Guidance, executor: LLExecutor) -> None:
        began = time.monotonic()
        is_able = one.catch_up(executor)
        seconds, began = time.monotonic() - began, time.thread_time()
        if is_able:
            words = np.zeros_like(one.words)
            # In this thread, so that its time counts and not that of other work on the machine.
            one.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if one.matcher.is_error():
                one.fail(one.matcher.get_error())
            one.words = words
        one.record(seconds + time.thread_time() - began, self._begin_alone)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    @cached_property
    def _slow_executor(self) -> LLExecutor:
        return LLExecutor(1)


def _compute_masks(guided: Sequence[Guidance], executor: LLExecutor) -> None:
    able = [one for one in guided if one.catch_up(executor)]
    if not able:
        return
    masks = np.zeros((len(able), able[0].words.size), dtype=np.uint32)
    rows = [(one.matcher, row) for row, one in enumerate(able)]
    # In parallel, without the interpreter's lock.
    executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(able))
    for one, words in zip(able, masks, strict=True):
        if one.matcher.is_error():
            one.fail(one.matcher.get_error())
        one.words = words


def apply_masks(logits: torch.Tensor, masks: Mapping[int, Words]) -> None:
    """Excludes, in place, what the masks of rows do not allow in `logits` `[rows, vocabulary]`."""
    if not masks:
        return
    packed = torch.from_numpy(np.stack(list(masks.values())).view(np.uint8)).to(logits.device)
    rows = torch.tensor(list(masks), device=logits.device)
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits.device)
    is_banned = (packed.unsqueeze(-1) & bits).view(len(masks), -1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(is_banned, -torch.inf)
