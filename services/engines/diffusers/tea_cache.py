"""TeaCache (arXiv 2411.19108): leaves out a transformer's blocks in steps whose input has hardly changed.

Between two steps the output changes about as much as the input of the first block does after its modulation by the
step's time. The relative changes add up, rescaled by a polynomial; while the sum is below a threshold, what the blocks
added to their input the last time is added again.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from baton.errors import ConfigError
from services.engines.diffusers.config import TeaCacheConfig
from services.engines.pytorch.parallel.ranks import Ranks

Inputs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Kind:
    """The names of a class's blocks, in order, and what is compared from step to step, of the first one's
    inputs; and whether blocks return the states of the text before those of the picture.
    """

    blocks: tuple[str, ...]
    compared: Callable[[Any, Inputs], torch.Tensor]
    returns_text: bool = False


def _adaptive_norm(block: Any, inputs: Inputs) -> torch.Tensor:
    compared: torch.Tensor = block.norm1(inputs["hidden_states"], emb=inputs["temb"])[0]
    return compared


def _modulated_norm(block: Any, inputs: Inputs) -> torch.Tensor:
    states, time = inputs["hidden_states"], inputs["timestep"]
    shift, scale = (block.scale_shift_table[None] + time.reshape(len(states), 6, -1))[:, :2].chunk(2, dim=1)
    compared: torch.Tensor = block.norm1(states) * (1 + scale) + shift
    return compared


def _time(_block: Any, inputs: Inputs) -> torch.Tensor:
    compared: torch.Tensor = inputs["temb"]
    return compared


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "FluxTransformer2DModel": _Kind(
            ("transformer_blocks", "single_transformer_blocks"), _adaptive_norm, returns_text=True
        ),
        "LatteTransformer3DModel": _Kind(("transformer_blocks", "temporal_transformer_blocks"), _modulated_norm),
        "WanTransformer3DModel": _Kind(("blocks",), _time),
    }
)


@dataclass(slots=True)
class _Memory:
    """Of one of the transformer's calls in a step: with and without the prompt they are two in some pipelines."""

    compared: torch.Tensor | None = None
    change: float = 0.0
    added: torch.Tensor | None = None


class TeaCache:
    """A cache on a transformer, for one batch at a time: `begin`, `next_step` after each step, and `end`.

    The first step and the last one are always computed. Put it on before modules are offloaded, so that
    the hooks which move their weights are outermost.
    """

    def __init__(self, transformer: Any, config: TeaCacheConfig, ranks: Ranks) -> None:
        name = type(transformer).__name__
        if name not in _KINDS:
            raise ConfigError(f"engine.tea_cache: {name} is not supported; expected one of {', '.join(_KINDS)}")
        self._kind, self._config, self._ranks = _KINDS[name], config, ranks
        self.reused = 0  # of the transformer's calls, those without blocks
        self._steps = self._step = self._call = 0
        self._memories: dict[int, _Memory] = {}
        self._states: torch.Tensor | None = None  # the input of the first block
        self._is_skipping = False
        blocks = [block for part in self._kind.blocks for block in getattr(transformer, part)]
        for block in blocks:
            block.forward = self._skipping(block.forward)
        blocks[0].forward = self._deciding(blocks[0])
        transformer.norm_out.register_forward_pre_hook(self._after_blocks)

    def begin(self, steps: int) -> None:
        """Begins a batch."""
        self.end()
        self._steps = steps

    def next_step(self) -> None:
        """Begins the next step."""
        self._step, self._call = self._step + 1, 0

    def end(self) -> None:
        """Forgets the batch, and frees what is kept of it."""
        self._steps = self._step = self._call = 0
        self._memories.clear()
        self._states, self._is_skipping = None, False

    def _deciding(self, block: Any) -> Callable[..., Any]:
        forward, signature = block.forward, inspect.signature(type(block).forward)

        def decide(*positional: Any, **named: Any) -> Any:
            inputs = signature.bind(block, *positional, **named).arguments
            memory = self._memories.setdefault(self._call, _Memory())
            self._states = inputs["hidden_states"]
            self._is_skipping = self._hardly_changed(memory, self._kind.compared(block, inputs))
            return forward(*positional, **named)

        return decide

    def _skipping(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(forward).parameters)

        def skip(*positional: Any, **named: Any) -> Any:
            if not self._is_skipping:
                return forward(*positional, **named)
            inputs = {**dict(zip(parameters, positional, strict=False)), **named}
            states = inputs["hidden_states"]
            return (inputs["encoder_hidden_states"], states) if self._kind.returns_text else states

        return skip

    def _hardly_changed(self, memory: _Memory, compared: torch.Tensor) -> bool:
        before, memory.compared = memory.compared, compared.detach()
        is_first_or_last = self._step == 0 or self._step >= self._steps - 1
        if is_first_or_last or before is None or before.shape != compared.shape or memory.added is None:
            memory.change = 0.0
            return False
        relative = ((compared - before).abs().mean() / before.abs().mean()).float()
        self._ranks.share(relative)  # so that all leave out the same steps
        memory.change += polynomial(self._config.coefficients, relative.item())
        if memory.change < self._config.threshold:
            return True
        memory.change = 0.0
        return False

    def _after_blocks(self, _module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = inputs
        memory = self._memories[self._call]
        self._call += 1
        assert self._states is not None
        first, self._states = self._states, None
        if not self._is_skipping:
            memory.added = (states - first).detach()
            return inputs
        self.reused += 1
        assert memory.added is not None
        return (first + memory.added, *others)


def polynomial(coefficients: Sequence[float], value: float) -> float:
    """Its value, by the coefficients from the highest power down."""
    total = 0.0
    for coefficient in coefficients:
        total = total * value + coefficient
    return total
