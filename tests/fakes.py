"""A clock to set, and an executor that proves every plan against its own model of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.engine import Engine
from engine.kv import BlockPool, HostTier
from engine.kv_cache import Slabs
from engine.sampling.params import SamplingParams
from engine.scheduler import SchedulerConfig
from engine.step import Sampled, SequenceStart, StepPlan, StepResult, TokenLogprobs, Work

VOCAB = 97
MASK = (1 << 61) - 1
ROOT = 7
UNWRITTEN = -1


@dataclass
class Clock:
    """Seconds, moved by hand and by fake executors."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def extend_chain(chain: list[int], tokens: list[int]) -> None:
    """KV of a position stands for all tokens up to it: one hash a position, each made from the one before."""
    value = chain[-1] if chain else ROOT
    for token in tokens[len(chain) :]:
        value = (value * 6364136223846793005 + token + 1442695040888963407) & MASK
        chain.append(value)


def next_token(chain: list[int], params: SamplingParams | None = None, vocab: int = VOCAB) -> int:
    """Of a sampled request with a seed it depends on that as well."""
    value = chain[-1]
    if params is not None and params.seed is not None and not params.greedy:
        value ^= params.seed * 0x9E3779B97F4A7C15 & MASK
    return (value >> 17) % vocab


def logprobs_of(chain: list[int], token: int, params: SamplingParams, vocab: int = VOCAB) -> TokenLogprobs | None:
    """Of the token that follows the chain: as good as a fingerprint of all tokens before it."""
    if params.logprobs is None:
        return None
    value = chain[-1] >> 7
    top = [((token + i) % vocab, -(value % 977 + i) / 64) for i in range(params.logprobs)]
    return TokenLogprobs(-(value % 1009) / 128, 1 + value % 5, top)


def continuation(
    prompt: list[int], params: SamplingParams, eos: tuple[int, ...] = (), max_length: int = 1 << 30
) -> tuple[list[int], str]:
    """What an undisturbed run of a prompt makes: (tokens, finish reason)."""
    tokens, chain = list(prompt), list[int]()
    while True:
        extend_chain(chain, tokens)
        token = next_token(chain, params)
        tokens.append(token)
        output = tokens[len(prompt) :]
        if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
            return output, "stop"
        if len(output) == params.max_tokens or len(tokens) >= max_length:
            return output, "length"


@dataclass
class FakeSequence:
    tokens: list[int]
    blocks: list[int]
    params: SamplingParams
    chain: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        extend_chain(self.chain, self.tokens)


class FakeExecutor:
    """Computes hashes instead of a model and fails on any plan that would read wrong KV.

    Before a sequence's work every earlier position must lie in its block table with the KV of exactly its tokens, as
    written by a step, a swap or `write_blocks`; a block that is written must belong to one sequence alone.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host_slots: int = 0,
        *,
        clock: Clock | None = None,
        config: SchedulerConfig | None = None,
        seconds_per_token: float = 0.0,
        seconds_per_copy: float = 0.0,
    ):
        self.block_size = block_size
        self.config = config or SchedulerConfig()
        self.clock = clock or Clock()
        self.seconds_per_token = seconds_per_token
        self.seconds_per_copy = seconds_per_copy
        self.kv = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self.host: list[list[int] | None] = [None] * host_slots
        self.sequences: dict[str, FakeSequence] = {}
        self.plans: list[StepPlan] = []
        self.failure: Exception | None = None  # raised by the next step

    def execute(self, plan: StepPlan) -> StepResult:
        if self.failure is not None:
            raise self.failure
        assert not self.plans or plan.step > self.plans[-1].step
        self.plans.append(plan)
        for block, slot in plan.swap_out:
            self.host[slot] = list(self.kv[block])
        for slot, block in plan.swap_in:
            content = self.host[slot]
            assert content is not None, f"host slot {slot} was never written"
            self.kv[block] = list(content)
        for ended in plan.ended:
            assert self.sequences.pop(ended, None) is not None, f"{ended} ended, but never started"
        for start in plan.starts:
            self._start(start)
        assert plan.num_tokens <= self.config.max_num_batched_tokens, "the step is over its budget"
        assert len(plan.work) <= self.config.max_num_seqs, "the step has too many sequences"
        ids = [work.id for work in plan.work]
        assert len(set(ids)) == len(ids), "a sequence is in the step twice"
        assert {start.id for start in plan.starts} <= set(ids), "a sequence starts without work"
        for work in plan.work:
            self.sequences[work.id].blocks.extend(work.new_blocks)
        for work in plan.work:
            self._prepare(work)
        sampled = [found for work in plan.work if (found := self._compute(work)) is not None]
        copies = (len(plan.swap_out) + len(plan.swap_in)) * self.seconds_per_copy
        seconds = plan.num_tokens * self.seconds_per_token + copies
        self.clock.now += seconds
        return StepResult(plan.step, sampled, seconds, copies)

    def read_blocks(self, blocks: list[int]) -> np.ndarray:
        rows = np.array([self.kv[block] for block in blocks], dtype=np.int64).reshape(len(blocks), self.block_size)
        return rows.view(np.uint8)

    def pool_memory(self) -> tuple[int, int, str]:
        raise ValueError("a fake has no memory of its own")

    def view_blocks(self, blocks: list[int]) -> Slabs:
        return self.read_blocks(blocks)

    def write_blocks(self, blocks: list[int], data: Slabs) -> None:
        for block, row in zip(blocks, data, strict=True):
            assert row.dtype == np.uint8 and row.shape == (8 * self.block_size,)
            self.kv[block] = row.view(np.int64).tolist()

    def _start(self, start: SequenceStart) -> None:
        assert start.id not in self.sequences, f"{start.id} starts twice"
        self.sequences[start.id] = FakeSequence(list(start.tokens), list(start.blocks), start.params)

    def _prepare(self, work: Work) -> None:
        """Check what the work reads and whom it overwrites."""
        sequence, size, end = self.sequences[work.id], self.block_size, work.start + work.count
        assert work.count > 0, f"{work.id} has no work"
        assert end <= len(sequence.tokens), f"{work.id} computes positions it has no tokens for"
        assert work.sample == (end == len(sequence.tokens)), f"{work.id} samples at the wrong position"
        assert len(set(sequence.blocks)) == len(sequence.blocks), f"{work.id} has a block twice"
        assert len(sequence.blocks) * size >= end, f"{work.id} has too few blocks"
        for position in range(work.start):
            found = self.kv[sequence.blocks[position // size]][position % size]
            assert found == sequence.chain[position], f"{work.id} would read wrong KV at position {position}"
        for index in range(work.start // size, (end - 1) // size + 1):
            block = sequence.blocks[index]
            users = [name for name, other in self.sequences.items() if block in other.blocks]
            assert users == [work.id], f"block {block} is written by {work.id} and belongs to {users}"

    def _compute(self, work: Work) -> Sampled | None:
        sequence, size = self.sequences[work.id], self.block_size
        for position in range(work.start, work.start + work.count):
            self.kv[sequence.blocks[position // size]][position % size] = sequence.chain[position]
        if not work.sample:
            return None
        token = next_token(sequence.chain, sequence.params)
        logprobs = logprobs_of(sequence.chain, token, sequence.params)
        sequence.tokens.append(token)
        extend_chain(sequence.chain, sequence.tokens)
        return Sampled(work.id, token, logprobs)


def make_engine(
    num_blocks: int = 16,
    block_size: int = 4,
    host_slots: int = 0,
    *,
    keep_evicted: bool = False,
    clock: Clock | None = None,
    seconds_per_token: float = 0.0,
    seconds_per_copy: float = 0.0,
    **config: Any,
) -> Engine:
    """An engine on a `FakeExecutor`; further arguments are fields of SchedulerConfig."""
    clock = clock or Clock()
    scheduling = SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 48, **config})
    executor = FakeExecutor(
        num_blocks,
        block_size,
        host_slots,
        clock=clock,
        config=scheduling,
        seconds_per_token=seconds_per_token,
        seconds_per_copy=seconds_per_copy,
    )
    pool = BlockPool(num_blocks, block_size, HostTier(host_slots), keep_evicted=keep_evicted)
    return Engine(executor, pool, scheduling, vocab_size=VOCAB, clock=clock)


def executor_of(engine: Engine) -> FakeExecutor:
    assert isinstance(engine.executor, FakeExecutor)
    return engine.executor
