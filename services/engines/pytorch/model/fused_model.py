"""Llama-like models with few, large operations: joined projections, and attention that reads the pool in place.

The modules are transformers' own: each joined matrix contains the weights of its parts, which become views of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from services.engines.pytorch.kernels.paged_ops import HeadNorms, HeadShape, PagedOps, PagedTokens
from services.engines.pytorch.model.support import TextShape
from services.engines.pytorch.parallel.ranks import ExchangeShape, OneRank, Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose text layers are supported here."""

_ANGLES_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix `[out, in]`, and its bias, if it has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer's weights."""

    input_norm: torch.Tensor
    qkv: Projection
    head_norms: HeadNorms | None
    output: Projection
    post_norm: torch.Tensor
    gate_up: Projection
    down: Projection


def why_not(config: "PreTrainedConfig") -> str:
    """Returns why a model is not supported; empty if it is."""
    text = config.get_text_config()
    if text.model_type not in FAMILIES:
        return f"models of type {text.model_type} are not among {', '.join(FAMILIES)}"
    if text.hidden_act != "silu":
        return f"its activation is {text.hidden_act}"
    if float(_rope(text).get("partial_rotary_factor") or 1.0) != 1.0:
        return "it rotates a part of each head only"
    return ""


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """All of a Llama-like model: its weights, and the `angles`, cosine and sine, of every position."""

    embedding: torch.Tensor
    layers: Sequence[FusedLayer]
    norm: torch.Tensor
    eps: float
    head: Projection
    scaling: float
    angles: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, module: torch.nn.Module, positions: int) -> "FusedWeights":
        """Joins the weights of transformers' module, whose own become views of them."""
        outer: Any = module
        text = getattr(outer.model, "language_model", outer.model)
        embedding: torch.Tensor = text.embed_tokens.weight
        return cls(
            embedding=embedding,
            layers=[_fuse(layer) for layer in text.layers],
            norm=text.norm.weight,
            eps=float(text.norm.variance_epsilon),
            head=Projection(outer.lm_head.weight, outer.lm_head.bias),
            scaling=float(text.layers[0].self_attn.scaling),
            angles=_angles(text.rotary_emb, positions, embedding),
        )


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Tokens between two groups of layers, `[tokens, hidden size]`: their `residual`, and the `part` to be added."""

    residual: torch.Tensor
    part: torch.Tensor


class FusedModel:
    """A model that computes KV into `pool` `[blocks, layers, 2, kv_heads, block_tokens, head_dim]`, and logits.

    With `ranks`, the weights, `shape` and `pool` are one rank's parts.
    """

    def __init__(
        self, weights: FusedWeights, shape: TextShape, pool: torch.Tensor, ops: PagedOps, ranks: Ranks | None = None
    ) -> None:
        self._ops = ops
        self._ranks = ranks or OneRank()
        self._embedding = weights.embedding
        self._layers = weights.layers
        self._pool_layers = [pool[:, index] for index in range(len(self._layers))]
        self._norm, self._eps, self._head = weights.norm, weights.eps, weights.head
        self._shape = HeadShape(shape.query_heads, shape.kv_heads, shape.head_dim, weights.scaling)
        self._angles = weights.angles
        self.vocab_size = shape.vocab_size if self._ranks.size > 1 else self._head.weight.shape[0]
        self.dtype = self._head.weight.dtype

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows `[tokens, hidden size]` for ids `[tokens]`."""
        return torch.nn.functional.embedding(token_ids, self._embedding)

    def run(self, embedded: torch.Tensor, tokens: PagedTokens, last_rows: torch.Tensor | None) -> torch.Tensor:
        """Returns the logits `[rows, vocabulary]` of `last_rows`, None for all. Overwrites `embedded`, rank 0's."""
        self._ranks.share(embedded)
        part: torch.Tensor | None = None  # this rank's part of the sum that is added to the residual
        for index in range(len(self._layers)):
            part = self._layer(index, part, embedded, tokens)
        return self._logits(part, embedded, last_rows)

    def run_group(
        self, embedded: torch.Tensor, tokens: PagedTokens, last_rows: torch.Tensor | None, group: range, kept: KeptRows
    ) -> torch.Tensor:
        """Returns the logits of a step whose tokens in tiles go through the layers of `group` only; without ranks.

        They begin as the group before has left them in `kept`. `last_rows` are single tokens', unless the group is the
        last one.
        """
        singles = tokens.singles
        few, part, residual = tokens.without_tiles(), None, embedded[:singles]
        for index in range(len(self._layers)):
            if index == group.start:
                residual = embedded if part is None else torch.cat((residual, kept.residual))
                part = None if part is None else torch.cat((part, kept.part))
            part = self._layer(index, part, residual, tokens if index in group else few)
            if index == group[-1] and group.stop < len(self._layers):
                kept.residual.copy_(residual[singles:])
                kept.part.copy_(part[singles:])
                residual, part = residual[:singles], part[:singles]
        return self._logits(part, residual, last_rows)

    @property
    def num_layers(self) -> int:
        """The layers."""
        return len(self._layers)

    def kept_rows(self, tokens: int) -> KeptRows:
        """Returns memory for so many tokens between two groups of layers."""
        empty = self._embedding.new_zeros(2, tokens, self._embedding.shape[1])
        return KeptRows(empty[0], empty[1])

    def _layer(
        self, index: int, part: torch.Tensor | None, residual: torch.Tensor, tokens: PagedTokens
    ) -> torch.Tensor:
        """Computes one layer; adds `part` to `residual`, and returns what is to be added next."""
        ops, layer, pool = self._ops, self._layers[index], self._pool_layers[index]
        qkv = layer.qkv(self._normalised(part, residual, layer.input_norm))
        ops.rotate_and_write(qkv, self._angles, tokens, pool, layer.head_norms)
        part = layer.output(ops.attend(qkv, tokens, pool, self._shape))
        gate_up = layer.gate_up(self._normalised(part, residual, layer.post_norm))
        return layer.down(ops.gate(gate_up))

    def _logits(
        self, part: torch.Tensor | None, residual: torch.Tensor, last_rows: torch.Tensor | None
    ) -> torch.Tensor:
        if last_rows is None or part is None:
            return self._ranks.columns(self._head(self._normalised(part, residual, self._norm)), self.vocab_size)
        delta = self._ranks.add_up(part)[last_rows]
        last = self._ops.rms_norm(delta, residual[last_rows], self._norm, self._eps)
        return self._ranks.columns(self._head(last), self.vocab_size)

    def prepare(self, rows: int) -> None:
        """Makes ready for steps of up to so many rows, which may be captured; on all ranks, before the first step."""
        width, columns = self._embedding.shape[1], self._head.weight.shape[0]
        self._ranks.prepare(ExchangeShape(rows, width, columns, self.dtype))

    def _normalised(self, part: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if part is None:
            return self._ops.rms_norm(None, residual, weight, self._eps)
        return self._ranks.add_and_normalise(self._ops, part, residual, weight, self._eps)


def _fuse(layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        eps = float(attention.q_norm.variance_epsilon)
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, eps)
    return FusedLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=_joined((attention.q_proj, attention.k_proj, attention.v_proj)),
        head_norms=norms,
        output=Projection(attention.o_proj.weight, attention.o_proj.bias),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=_joined((mlp.gate_proj, mlp.up_proj)),
        down=Projection(mlp.down_proj.weight, mlp.down_proj.bias),
    )


def _joined(parts: Sequence[torch.nn.Linear]) -> Projection:
    """Joins matrices into one; the parts become views of it."""
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    first = 0
    for part in parts:
        part.weight = torch.nn.Parameter(weight[first : first + part.out_features], requires_grad=False)
        first += part.out_features
    return Projection(weight, bias)


def _angles(rotary: Any, positions: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosine and sine of every position, `[positions, head_dim]` each, as the library computes them."""
    found = [
        rotary(like, torch.arange(first, min(first + _ANGLES_AT_ONCE, positions), device=like.device).unsqueeze(0))
        for first in range(0, positions, _ANGLES_AT_ONCE)
    ]
    cos, sin = (torch.cat([part[which][0] for part in found]).contiguous() for which in (0, 1))
    return cos, sin


def _rope(text: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return found
