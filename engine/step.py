"""The two messages that cross the seam between scheduler and runner: a plan of deltas in, a result out."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence the runner does not know (new, resumed or adopted): all its state."""

    id: str
    tokens: list[int]
    num_prompt: int
    blocks: list[int]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Work:
    """Positions [start, start + count) of one sequence in this step; new_blocks extend its block table."""

    id: str
    start: int
    count: int
    new_blocks: tuple[int, ...]
    sample: bool  # the last position is the newest known token: sample the next one


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Executed in this order: swap_out, swap_in, drop `ended`, add `starts`, forward, sample."""

    step: int
    starts: list[SequenceStart] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host slot)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host slot, device block)

    @property
    def num_tokens(self) -> int:
        return sum(work.count for work in self.work)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw float32 log-softmax of the model, before any edit of the logits."""

    logprob: float
    rank: int  # 1: the most likely token
    top: list[tuple[int, float]]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Sampled:
    id: str
    token: int  # below 0: the logits were not finite
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    sampled: list[Sampled]
    seconds: float  # wall time of the step
    copy_seconds: float = 0.0  # of that, swap copies
