"""The adapters' matrices on the device, and how layers add them: all adapters of a step in two products a layer.

Each adapter has a slot, `max_rank` rows of the stacked matrices. A token's row of `x @ down` is set to zero outside of
its own slot, so that `@ up` adds its own adapter alone: exactly zero for the others, and for tokens without one. The
idea is that of Punica (https://arxiv.org/abs/2310.18547), with a mask in the place of a gather: the shapes do not
depend on which adapters meet in a step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.errors import ConfigError
from services.engines.lora.peft_folder import LowRank

NO_SLOT = -1


@dataclass(slots=True)
class _Stack:
    """One module's matrices: `down` `[slots x rank, in]`, `up` `[slots x rank, out]`, and the slots that use it."""

    down: torch.Tensor
    up: torch.Tensor
    used: set[int]


@dataclass(frozen=True, slots=True)
class _Span:
    """The rows of the stacks that a step needs, and `mask` `[tokens, rows]`: which of them a token must not use."""

    rows: slice
    mask: torch.Tensor
    slots: frozenset[int]


class LoraLayers:
    """Adds adapters to the linear layers of a model, between its steps and for its thread only."""

    def __init__(self, model: torch.nn.Module, max_loaded: int, max_rank: int) -> None:
        self._rank = max_rank
        self._stacks = {name: self._attach(module, max_loaded * max_rank) for name, module in adaptable(model).items()}
        if not self._stacks:
            raise ConfigError("engine.lora: the model has no linear layers that adapters could change")
        self._span: _Span | None = None

    def install(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        """Writes an adapter, by names of `placed`, to a slot that no sequence uses."""
        rows = slice(slot * self._rank, (slot + 1) * self._rank)
        for name, stack in self._stacks.items():
            stack.used.discard(slot)
            stack.down[rows], stack.up[rows] = 0, 0
            if (found := matrices.get(name)) is not None:
                rank = found.down.shape[0]
                stack.down[rows.start : rows.start + rank] = found.down.to(stack.down)
                stack.up[rows.start : rows.start + rank] = found.up.t().to(stack.up)
                stack.used.add(slot)

    def placed(self, matrices: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """Returns an adapter's matrices by the names of this model's modules. Safe on every thread.

        Raises ConfigError naming the module that this model does not have, or whose shape differs.
        """
        by_end = {_end(name): name for name in self._stacks}
        found: dict[str, LowRank] = {}
        for module, pair in matrices.items():
            name = module if module in self._stacks else by_end.get(_end(module), "")
            if not name or "vision" in module:
                raise ConfigError(f"{module}: no linear layer of the language model that can have an adapter")
            stack = self._stacks[name]
            if (pair.down.shape[1], pair.up.shape[0]) != (stack.down.shape[1], stack.up.shape[1]):
                shape = [stack.up.shape[1], stack.down.shape[1]]
                raise ConfigError(f"{module}: the adapter's matrices do not fit the layer, which is {shape}")
            found[name] = pair
        return found

    def choose(self, slots: Sequence[tuple[int, int]]) -> None:
        """Sets the slots of the next step's tokens: pairs of slot, or NO_SLOT, and number of tokens, in their order."""
        used = frozenset(slot for slot, _ in slots if slot != NO_SLOT)
        self._span = self._make_span(slots, used) if used else None

    def _make_span(self, slots: Sequence[tuple[int, int]], used: Iterable[int]) -> _Span:
        device = next(iter(self._stacks.values())).down.device
        first, last = min(used), max(used)
        columns = torch.arange(first, last + 1).repeat_interleave(self._rank)
        tokens = torch.tensor([slot for slot, _ in slots]).repeat_interleave(
            torch.tensor([count for _, count in slots])
        )
        rows = slice(first * self._rank, (last + 1) * self._rank)
        return _Span(rows, (tokens[:, None] != columns[None]).to(device), frozenset(used))

    def _attach(self, module: torch.nn.Linear, rows: int) -> _Stack:
        weight = module.weight
        down = torch.zeros(rows, module.in_features, dtype=weight.dtype, device=weight.device)
        up = torch.zeros(rows, module.out_features, dtype=weight.dtype, device=weight.device)
        stack = _Stack(down, up, set())

        def add(_module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            span = self._span
            if span is None or stack.used.isdisjoint(span.slots):
                return output
            inner = (inputs[0] @ stack.down[span.rows].t()).masked_fill_(span.mask, 0.0)
            changed: torch.Tensor = output + inner @ stack.up[span.rows]
            return changed

        module.register_forward_hook(add)
        return stack


def adaptable(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Returns the linear layers that see each token of a step once, by name: not the output layer, nor experts."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in f".{name}" and ".experts." not in name
    }


def _end(name: str) -> str:
    """The part of a name that does not depend on the class around the layers."""
    before, found, after = f".{name}".rpartition(".layers.")
    return found + after if found else before
