"""Executes step plans on one device: the only part of the engine that touches tensors.

Keeps the state of every sequence it was told of, so that a plan carries deltas only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from engine.context import reset_context, set_context
from engine.kv_cache import KVCache, Slabs
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import Penalties
from engine.sampling.sampler import Sampler, SampleRow
from engine.step import Sampled, SequenceStart, StepPlan, StepResult, Work
from kernels.metadata import AttentionMetadata


@dataclass(slots=True)
class Sequence:
    """A sequence as the runner knows it: its ids so far and its block table."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    blocks: np.ndarray  # int32, grown by doubling; the first num_blocks are valid
    num_blocks: int = field(default=0)
    penalties: Penalties | None = None  # where params.penalized

    @classmethod
    def from_start(cls, start: SequenceStart) -> Sequence:
        table = np.zeros(max(16, 2 * len(start.blocks)), dtype=np.int32)
        sequence = cls(list(start.tokens), start.num_prompt, start.params, start.seed, table)
        sequence.extend(start.blocks)
        if start.params.penalized:
            sequence.penalties = Penalties(start.tokens, start.num_prompt, start.params)
        return sequence

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.penalties is not None:
            self.penalties.add(token)

    def sample_row(self) -> SampleRow:
        """How to sample its next token."""
        return SampleRow(self.params, self.seed, len(self.tokens) - self.num_prompt, self.penalties)

    def extend(self, blocks: list[int] | tuple[int, ...]) -> None:
        if self.num_blocks + len(blocks) > len(self.blocks):
            self.blocks = np.concatenate([self.blocks, np.zeros(len(self.blocks) + len(blocks), dtype=np.int32)])
        self.blocks[self.num_blocks : self.num_blocks + len(blocks)] = blocks
        self.num_blocks += len(blocks)


class ModelRunner:
    """The in-process executor: `execute(plan) -> result`, and block reads and writes between steps."""

    def __init__(self, model: nn.Module, kv: KVCache, device: str = "cpu"):
        self.model = model
        self.kv = kv
        self.device = device
        self.sampler = Sampler()
        self.sequences: dict[str, Sequence] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        self.kv.swap_out(plan.swap_out)
        self.kv.swap_in(plan.swap_in)
        copied = time.perf_counter() if plan.swap_out or plan.swap_in else started
        for ended in plan.ended:
            self.sequences.pop(ended, None)
        for start in plan.starts:
            self.sequences[start.id] = Sequence.from_start(start)
        sampled = self._forward(plan.work) if plan.work else []
        return StepResult(plan.step, sampled, time.perf_counter() - started, copied - started)

    def read_blocks(self, blocks: list[int]) -> np.ndarray:
        return self.kv.read(blocks)

    def view_blocks(self, blocks: list[int]) -> Slabs:
        return self.kv.views(blocks)

    def write_blocks(self, blocks: list[int], data: Slabs) -> None:
        self.kv.write(blocks, data)

    def pool_memory(self) -> tuple[int, int, str]:
        return self.kv.slabs.data_ptr(), len(self.kv.slabs), self.device

    def _forward(self, plan_work: list[Work]) -> list[Sampled]:
        work = sorted(plan_work, key=lambda w: w.count != 1)  # one-token sequences first, else in plan order
        input_ids, positions, metadata = self._inputs(work)
        set_context(metadata, self.kv)
        try:
            hidden = self.model(input_ids, positions)
        finally:
            reset_context()
        ends = np.cumsum([w.count for w in work]) - 1
        sampling = [(w, int(end)) for w, end in zip(work, ends, strict=True) if w.sample]
        if not sampling:
            return []
        rows = [self.sequences[w.id].sample_row() for w, _ in sampling]
        hidden = hidden[torch.tensor([end for _, end in sampling])]
        logits = self.model.compute_logits(hidden)  # type: ignore[operator]
        greedy = self.model.greedy_tokens
        output = self.sampler.sample(logits, rows, lambda some: greedy(hidden[some], logits[some]))  # type: ignore[operator]
        results = []
        for (w, _), token, logprobs in zip(sampling, output.ids, output.logprobs, strict=True):
            if token >= 0:
                self.sequences[w.id].append(token)
            results.append(Sampled(w.id, token, logprobs))
        return results

    def _inputs(self, work: list[Work]) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Ids, positions and attention metadata of one ragged batch."""
        size = self.kv.format.block_size
        total = sum(w.count for w in work)
        ids = np.empty(total, dtype=np.int64)
        positions = np.empty(total, dtype=np.int64)
        slots = np.empty(total, dtype=np.int64)
        widest = max(-(-(w.start + w.count) // size) for w in work)
        tables = np.zeros((len(work), widest), dtype=np.int32)
        at = 0
        for row, w in enumerate(work):
            sequence = self.sequences[w.id]
            if w.new_blocks:
                sequence.extend(w.new_blocks)
            used = -(-(w.start + w.count) // size)
            tables[row, :used] = sequence.blocks[:used]
            if w.count == 1:
                ids[at] = sequence.tokens[w.start]
                positions[at] = w.start
                slots[at] = int(sequence.blocks[w.start // size]) * size + w.start % size
            else:
                span = np.arange(w.start, w.start + w.count, dtype=np.int64)
                ids[at : at + w.count] = sequence.tokens[w.start : w.start + w.count]
                positions[at : at + w.count] = span
                slots[at : at + w.count] = sequence.blocks[span // size].astype(np.int64) * size + span % size
            at += w.count
        metadata = AttentionMetadata(
            query_lens=[w.count for w in work],
            context_lens=[w.start + w.count for w in work],
            num_decodes=sum(w.count == 1 for w in work),
            block_tables=torch.from_numpy(tables).to(self.device),
            slot_mapping=torch.from_numpy(slots).to(self.device),
            block_size=size,
        )
        return torch.from_numpy(ids).to(self.device), torch.from_numpy(positions).to(self.device), metadata
