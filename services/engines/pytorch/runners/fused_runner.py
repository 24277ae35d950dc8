"""Steps of the fused model: decode steps, also with short chunks of prompts, replay CUDA graphs, and the next step is
started while one runs.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import structlog
import torch

from runtime.garbage import uncollected
from services.engines.guidance.compiler import MaskThreads
from services.engines.memory.cuda_driver import CAPTURING
from services.engines.pytorch.model.fused_model import FusedModel
from services.engines.pytorch.runners.batch import Chunk, MediaRows, media_rows
from services.engines.pytorch.runners.host_copies import HostCopies
from services.engines.pytorch.runners.layer_groups import GroupSize, LayerGroups, continued
from services.engines.pytorch.runners.mixed_steps import (
    MAX_PROMPTS,
    MixedSize,
    MixedStep,
    fill_mixed,
    mixed_sizes,
    smallest_step,
)
from services.engines.pytorch.runners.runner import InflightStep, guided
from services.engines.pytorch.runners.step_tensors import (
    KNOWN,
    TILE_NUMBERS,
    DecodeArrays,
    Layout,
    PromptRows,
    StepArrays,
    StepTensors,
    buckets,
    build,
    fill_decodes,
)
from services.engines.pytorch.sampling.drawing import AGAIN, BROKEN, Draw, choose, draw, is_drawable, upload
from services.engines.pytorch.sampling.sampling import Chosen, sample
from services.engines.pytorch.sequence import TokenSequence

_log = structlog.get_logger(__name__)

_WARM_UPS = 2

Computed = TypeVar("Computed")
Announce = Callable[[DecodeArrays | StepArrays], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The limits of a step, and whether decode steps are captured in CUDA graphs.

    They are captured before the first step; `graphs_later`: the largest, which any number of sequences can use, and the
    others later, while no step is in flight. So are steps with chunks of prompts of up to `graph_prompt_tokens`
    together; `graphs_later`: all of them later.
    """

    max_sequences: int
    max_context_tokens: int
    block_tokens: int
    graphs: bool = True
    graphs_later: bool = False
    graph_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode step of one batch size, with its own tensors. `run` computes; `logits` and `outcome` are its results.

    `flat` is read on the device; `outcome` `[2, size]` is that of `drawing.choose`.
    """

    size: int
    layout: Layout
    flat: torch.Tensor
    logits: torch.Tensor
    outcome: torch.Tensor
    run: Callable[[], None]


class FusedRunner:
    """StepRunner of a FusedModel. On a GPU, decode steps with the sizes of `buckets` are captured when it is made.

    It calls `announce` before each step, so that other ranks compute it too, by `replay` and `compute`.
    """

    def __init__(
        self,
        model: FusedModel,
        sizes: Sizes,
        device: torch.device,
        announce: Announce | None = None,
    ) -> None:
        self._model = model
        self._announce = announce or (lambda _step: None)
        self._sizes = sizes
        self._device = device
        self._copies = HostCopies(device)
        # The index of each sequence's id in `_newest`, the ids sampled by the last step in the order of its chunks.
        self._places: Mapping[TokenSequence, int] = {}
        self._newest = torch.zeros(sizes.max_sequences + MAX_PROMPTS, dtype=torch.int64, device=device)
        self.has_graphs = device.type == "cuda" and sizes.graphs
        model.prepare(sizes.max_sequences)
        self._uncaptured: list[int | MixedSize | GroupSize] = []  # sizes that are captured later, the next one last
        self._pool = torch.cuda.graph_pool_handle() if self.has_graphs else None
        # Memory that one stream has used is not another's: all sizes are captured on the same one.
        self._stream = torch.cuda.Stream(device) if self.has_graphs else None  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            self._compile_prefill()
        self._decodes = self._make_decodes()
        self._groups = LayerGroups(model.num_layers)
        self._mixed: list[MixedStep] = []
        self._make_mixed()
        self._masks = MaskThreads()

    def start(self, chunks: Sequence[Chunk]) -> InflightStep:
        """Starts a step without waiting for it, unless it contains images. See StepRunner.

        Masks are computed meanwhile, and applied to the logits outside of the captured graph.
        """
        self._masks.begin(guided(chunks))
        if (
            all(chunk.count == 1 and chunk.sequence.prompt_report is None for chunk in chunks)
            and len(chunks) <= self._sizes.max_sequences
        ):
            logits, outcome = self._decode(chunks)
            ordered = chunks
        else:
            ordered = sorted(chunks, key=lambda chunk: chunk.count > 1)
            mixed = smallest_step(self._mixed, ordered)
            if mixed is not None:
                return self._start_mixed(mixed, ordered)
            logits, outcome = self._compute(ordered)
        self._groups.forget()
        return self._finish(ordered, logits, outcome)

    def _start_mixed(self, mixed: MixedStep, chunks: Sequence[Chunk]) -> InflightStep:
        group = self._groups.next_of(mixed, chunks)
        if group is None:
            return self._finish(chunks, *self._compute_mixed(mixed, chunks))
        if not self._groups.is_last(group):
            chunks = continued(chunks)
        return self._finish(chunks, *self._compute_mixed(replace(mixed, run=mixed.groups[group]), chunks))

    def _decode(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        decode = next(decode for decode in self._decodes if decode.size >= len(chunks))
        flat = decode.layout.empty()
        fill_decodes(flat, decode.layout, chunks, self._places)
        step = DecodeArrays(decode.size, flat)
        self._announce(step)
        self.replay(step)
        return decode.logits[: len(chunks)], decode.outcome[:, : len(chunks)]

    def replay(self, step: DecodeArrays) -> None:
        """Starts a decode step of one of the sizes that there are."""
        decode = next(decode for decode in self._decodes if decode.size == step.size)
        self._copies.send(step.flat, decode.flat)
        decode.run()

    def _compute_mixed(self, mixed: MixedStep, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        flat = fill_mixed(mixed.size, mixed.layout, chunks, self._places)
        self._copies.send(flat, mixed.flat)
        mixed.run()
        count = sum(chunk.samples for chunk in chunks)
        return mixed.logits[:count], mixed.outcome[:, :count]

    def free_graphs(self) -> None:
        """Frees the captured steps; none can be started afterwards. NCCL's operations in them end only then."""
        self._decodes.clear()
        self._mixed.clear()

    def rehearse(self) -> None:
        """Computes an empty decode step of each size."""
        for decode in self._decodes:
            decode.run()

    def prepare_more(self) -> bool:
        """Captures a size that is not yet: the largest of decode steps, then of those with prompts. See StepRunner."""
        self._groups.forget()  # a capture writes where the rows between two groups are kept
        if self._uncaptured:
            began, size = time.monotonic(), self._uncaptured[-1]
            if isinstance(size, GroupSize):
                self._add_group(size)
            elif isinstance(size, MixedSize):
                self._mixed.append(self._mixed_step(size))
            else:
                self._decodes.insert(0, self._graphed_decode(size))
            self._uncaptured.pop()
            _log.info("step captured", size=str(size), seconds=round(time.monotonic() - began, 3))
        return bool(self._uncaptured)

    def _compute(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes any step, operation by operation."""
        flat, layout, singles = build(chunks, self._sizes.block_tokens, self._places)
        ends = np.cumsum([chunk.count for chunk in chunks])
        last = np.array([end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples], dtype=np.int64)
        reported = PromptRows(chunks)
        step = StepArrays(flat, layout.shape, singles, reported.after(torch.from_numpy(last)).numpy())
        self._announce(step)
        logits = self.compute(step, media_rows(chunks))
        logits = reported.report(logits, len(last))
        if not len(last):
            return logits, torch.zeros(2, 0, dtype=torch.int64, device=self._device)
        outcome = choose(logits)
        self._newest[: len(last)] = outcome[0]
        return logits, outcome

    def compute(self, step: StepArrays, media: Sequence[MediaRows] = ()) -> torch.Tensor:
        """Starts a step, operation by operation, and returns its logits."""
        tensors = Layout(*step.shape).views(upload(step.flat, self._device), step.singles)
        embedded = self._model.embed(self._ids(tensors))
        for part in media:
            embedded[part.start : part.start + len(part.rows)] = part.rows.to(embedded.device, embedded.dtype)
        return self._model.run(embedded, tensors.tokens, upload(step.rows, self._device))

    def _finish(self, chunks: Sequence[Chunk], logits: torch.Tensor, outcome: torch.Tensor) -> InflightStep:
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        self._places = {sequence: place for place, sequence in enumerate(sampling)}
        if not all(is_drawable(sequence.sampler, sequence.in_flight.ids) for sequence in sampling):
            return InflightStep(chunks, partial(_sampled, chunks, logits), may_be_followed=False)
        draws = [
            Draw(row, sequence.sampling, sequence.sampler.seed, sequence.sampler.position + sequence.in_flight.ids)
            for row, sequence in enumerate(sampling)
            if sequence.sampling.temperature > 0.0
        ]
        if draws:
            draw(logits, draws, outcome)
            self._newest[: len(sampling)] = outcome[0]
        return InflightStep(chunks, partial(_arrived, chunks, *self._copies.bring(outcome)), may_be_followed=True)

    def _ids(self, step: StepTensors) -> torch.Tensor:
        return torch.where(step.sources == KNOWN, step.token_ids, self._newest[step.sources.clamp(min=0)])

    def _make_decodes(self) -> list[Decode]:
        sizes = buckets(self._sizes.max_sequences)
        if not self.has_graphs:
            return [self._plain_decode(size) for size in sizes]
        if self._sizes.graphs_later:
            self._uncaptured += sizes[:-1]
            sizes = sizes[-1:]
        began = time.monotonic()
        # The largest first: its memory is then enough for the others.
        made = [self._graphed_decode(size) for size in reversed(sizes)]
        _log.info("decode steps captured", sizes=sizes, seconds=round(time.monotonic() - began, 1))
        return made[::-1]

    def _make_mixed(self) -> None:
        sizes = mixed_sizes(self._sizes.max_sequences, self._sizes.graph_prompt_tokens)
        if not sizes or (self._device.type == "cuda" and not self.has_graphs):
            return  # with padding they would only take longer
        rows = sizes[-1].rows
        self._mixed_logits = torch.zeros(rows, self._model.vocab_size, dtype=self._model.dtype, device=self._device)
        self._mixed_outcome = torch.zeros(2, rows, dtype=torch.int64, device=self._device)
        self._kept_rows = self._model.kept_rows(sizes[0].prompt_tokens)
        least = [size for size in sizes if size.prompt_tokens == sizes[0].prompt_tokens]
        groups = [GroupSize(size, group) for size in least for group in range(len(self._groups.ranges))]
        if self.has_graphs and self._sizes.graphs_later:
            self._uncaptured[:0] = [*reversed(groups), *sizes]
            return
        began = time.monotonic()
        # The largest first, as with decodes. The first of a machine compile kernels, for seconds: no stream waits yet.
        self._mixed += [self._mixed_step(size) for size in reversed(sizes)]
        for group in groups:
            self._add_group(group)
        if self.has_graphs:
            _log.info("steps with prompts captured", sizes=len(sizes), seconds=round(time.monotonic() - began, 3))

    def _compile_prefill(self) -> None:
        """Computes steps of padding with the narrowest and the widest table: prompts behind a long context have their
        own kernels, and the first request that needs either would wait for them.
        """
        for width in (1, self._decode_layout(1).shape[2]):
            layout = Layout(1, 1, width, tiles=1)
            flat = layout.empty()
            flat[-TILE_NUMBERS:] = (0, 1, 0, 0, 0)
            self._computed(layout.views(upload(flat, self._device), singles=0))

    def _plain_decode(self, size: int) -> Decode:
        layout = self._decode_layout(size)
        flat = upload(layout.empty(), self._device)
        step = layout.views(flat, size)
        logits = torch.zeros(size, self._model.vocab_size, dtype=self._model.dtype, device=self._device)
        outcome = torch.zeros(2, size, dtype=torch.int64, device=self._device)

        def run() -> None:
            logits.copy_(self._computed(step))
            outcome.copy_(choose(logits))
            self._newest[:size] = outcome[0]

        return Decode(size, layout, flat, logits, outcome, run)

    def _graphed_decode(self, size: int) -> Decode:
        layout = self._decode_layout(size)
        flat = upload(layout.empty(), self._device)
        step = layout.views(flat, size)

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            logits = self._computed(step)
            outcome = choose(logits)
            self._newest[:size] = outcome[0]
            return logits, outcome

        (logits, outcome), replay = self._captured(compute)
        return Decode(size, layout, flat, logits, outcome, replay)

    def _mixed_step(self, size: MixedSize) -> MixedStep:
        layout = size.layout(self._decode_layout(1).shape[2])
        flat = upload(layout.empty(), self._device)
        step = layout.views(flat, size.singles)
        # Those of all sizes are the same memory: a graph's own would stay.
        logits, outcome = self._mixed_logits[: size.rows], self._mixed_outcome[:, : size.rows]

        run = self._run_of(size, logits, outcome, lambda: self._computed(step))
        return MixedStep(size, layout, flat, logits, outcome, run)

    def _add_group(self, wanted: GroupSize) -> None:
        """Makes one group of layers of a size whose others are made."""
        index = next(index for index, mixed in enumerate(self._mixed) if mixed.size == wanted.size)
        mixed, layers = self._mixed[index], self._groups.ranges[wanted.group]
        step = mixed.layout.views(mixed.flat, mixed.size.singles)
        run = self._run_of(mixed.size, mixed.logits, mixed.outcome, lambda: self._group_computed(step, layers))
        self._mixed[index] = replace(mixed, groups=[*mixed.groups, run])

    def _run_of(
        self, size: MixedSize, logits: torch.Tensor, outcome: torch.Tensor, computed: Callable[[], torch.Tensor]
    ) -> Callable[[], None]:
        def compute() -> None:
            logits.copy_(computed())
            outcome.copy_(choose(logits))
            self._newest[: size.rows] = outcome[0]

        return self._captured(compute)[1] if self.has_graphs else compute

    def _captured(self, compute: Callable[[], Computed]) -> tuple[Computed, Callable[[], None]]:
        """Captures what `compute` starts on the device; returns its results, and what starts it again."""
        stream = self._stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Capture only the operations of this thread. Others may use the GPU meanwhile, but not wait for all of it, with
        # which a capture begins, too. A graph that this thread frees as garbage would end it.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with CAPTURING, uncollected(), capture:
            results = compute()
        return results, graph.replay

    def _computed(self, step: StepTensors) -> torch.Tensor:
        return self._model.run(self._model.embed(self._ids(step)), step.tokens, step.last_rows)

    def _group_computed(self, step: StepTensors, group: range) -> torch.Tensor:
        return self._model.run_group(
            self._model.embed(self._ids(step)), step.tokens, step.last_rows, group, self._kept_rows
        )

    def _decode_layout(self, size: int) -> Layout:
        return Layout(size, size, -(-self._sizes.max_context_tokens // self._sizes.block_tokens))


def _arrived(chunks: Sequence[Chunk], home: torch.Tensor, wait: Callable[[], None]) -> list[Chosen | None]:
    wait()
    rows = zip(*home.tolist(), strict=True)
    return [_chosen(*next(rows)) if chunk.samples else None for chunk in chunks]


def _chosen(token_id: int, how: int) -> Chosen:
    return Chosen(None if how == BROKEN else token_id, is_unsettled=how == AGAIN)


def _sampled(chunks: Sequence[Chunk], logits: torch.Tensor) -> list[Chosen | None]:
    """Samples on the host, for requests with options that the device does not support."""
    chosen = iter(sample(logits.float(), [chunk.sequence.sampler for chunk in chunks if chunk.samples]))
    return [next(chosen) if chunk.samples else None for chunk in chunks]
