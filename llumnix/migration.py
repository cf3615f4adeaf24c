"""One request on its way from one engine to another: the source's side as a pure state machine.

    source                                     destination
    Reserve(blocks, tokens so far) ----------> promises room; says how many leading blocks it has already
    Send(first, count) ----------------------> writes them            (the source goes on decoding)
    ... until what is left is small, or max_stages were sent
    Hold: the request stops at a step boundary
    Commit(record, last blocks, epoch) ------> owns it, joins the batch; idempotent
    End: the blocks here stay as prefix cache

The machine has one effect under way at a time: whoever runs it carries the effect out and hands the answer to the
method named after it, which returns the next effect; the last one is End. Before Commit has been sent every failure
leaves the request at the source. Afterwards the source never takes it back: if the destination refuses, the ingress
starts the request again; if nobody answers, the ingress is told where it may be and finds out.

Live migration by stages is from Llumnix (Sun et al., OSDI'24, section 4.2); pairs of epochs and no take-back are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Epoch = tuple[int, int]


class Mechanism(Enum):
    LIVE = "live"  # blocks are copied while the request goes on
    STOP_AND_COPY = "stop_and_copy"  # the request is held first
    RECOMPUTE = "recompute"  # no blocks are copied: the destination computes what it has not cached
    REQUEUE = "requeue"  # no blocks and no room asked for: it queues at the destination


class Outcome(Enum):
    MOVED = "moved"
    ABORTED = "aborted"  # the request is at the source as if nothing had been
    REFUSED = "refused"  # by the destination at Commit: the ingress starts it again
    UNCONFIRMED = "unconfirmed"  # Commit was sent and never answered: the ingress finds out


@dataclass(frozen=True, slots=True)
class Progress:
    """A request at the source, between two steps."""

    running: bool  # False: queued
    length: int  # known tokens
    computed: int  # positions whose KV is in its blocks
    epoch: Epoch
    preemptions: int


@dataclass(frozen=True)
class Limits:
    """How much at a time, and when to stop copying ahead."""

    block_size: int
    chunk_blocks: int = 32  # in one transfer; at least last_stage_blocks + 1
    last_stage_blocks: int = 1  # full blocks that may be left for Commit, beside the unfinished one
    max_stages: int = 4
    commit_blocks: int = 0  # most that go with Commit, where those are dearer than others; 0: a whole transfer


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for room; 0 blocks: ask only whether the destination takes the request at all, it will queue there."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Send:
    """Blocks [first, first + count) of the request's table; the promise is to be num_blocks long by then."""

    first: int
    count: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Stop the request. Its blocks from `first` on will be wanted next, unless copy is False."""

    first: int
    copy: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """The held record, blocks [first, first + count) of it, and the epoch under which the destination owns it."""

    epoch: Epoch
    computed: int
    first: int
    count: int
    reserved: bool


@dataclass(frozen=True, slots=True)
class End:
    outcome: Outcome
    reason: str = ""
    release: bool = False  # the destination's promise is to be taken back


Effect = Reserve | Send | Hold | Commit | End


class Outgoing:
    """The source's side of one move."""

    def __init__(self, limits: Limits, mechanism: Mechanism = Mechanism.LIVE, queued: bool = False):
        """`queued`: the request was chosen because it waits; one that has started meanwhile stays."""
        self.limits = limits
        self.mechanism = mechanism
        self.queued = queued
        self.stages = 0
        self.blocks_sent = self.blocks_skipped = 0
        self._sent = 0  # leading blocks the destination has
        self._promised = 0  # blocks it keeps for the request
        self._stage_end = 0  # blocks that were full when the stage began
        self._start: Progress | None = None
        self._held: int | None = None  # positions computed when the request was held
        self._reserved = False
        self._committed = False

    def start(self, progress: Progress | None) -> Effect:
        if progress is None:
            return End(Outcome.ABORTED, "gone")
        self._start = progress
        if self.queued and progress.running:
            return End(Outcome.ABORTED, "started")
        if not progress.running or self.mechanism is Mechanism.REQUEUE:
            self.mechanism = Mechanism.REQUEUE
            return Reserve(0)
        return Reserve(self._promise(progress))

    def reserved(self, present: int, progress: Progress | None) -> Effect:
        """The destination has promised the room and has the first `present` blocks."""
        if self.mechanism is Mechanism.REQUEUE:  # there is no promise
            return self._check(progress) or Hold(0, copy=False)
        if not self._reserved:
            self.blocks_skipped = present
        self._reserved = True
        self._sent = present
        if self.mechanism is Mechanism.LIVE or self._held is not None:
            return self._copy(progress)
        return self._check(progress) or Hold(present, copy=self.mechanism is Mechanism.STOP_AND_COPY)

    def sent(self, count: int, progress: Progress | None) -> Effect:
        """The destination has written the next `count` blocks."""
        self._sent += count
        self.blocks_sent += count
        return self._copy(progress)

    def held(self, progress: Progress) -> Effect:
        """The request stands still."""
        if self.queued and progress.running:
            return self.gone("started")
        self._held = progress.computed
        return self._copy(progress)

    def owned(self) -> Effect:
        """The destination has the request."""
        return End(Outcome.MOVED)

    def refused(self, reason: str) -> Effect:
        """The destination said no; it will not own the request under this move's epoch."""
        if self._committed:
            return End(Outcome.REFUSED, reason)
        return End(Outcome.ABORTED, reason, release=self._reserved)

    def silent(self, reason: str) -> Effect:
        """An effect on the destination was not answered in time, or its process is gone."""
        if self._committed:
            return End(Outcome.UNCONFIRMED, reason)
        return End(Outcome.ABORTED, reason, release=True)

    def gone(self, reason: str = "gone") -> Effect:
        """The request is not here any more: finished, cancelled, or the move was called off."""
        assert not self._committed
        return End(Outcome.ABORTED, reason, release=self._reserved)

    def called_off(self, reason: str = "gone") -> Effect:
        """The last effect was Commit, and it has not been sent: the request is not held here any more."""
        self._committed = False
        return self.gone(reason)

    # -- inside -------------------------------------------------------------------------------------------------

    def _check(self, progress: Progress | None) -> Effect | None:
        """The end of the move if the request is not what it was when the move began."""
        assert self._start is not None
        if progress is None:
            return self.gone()
        if progress.epoch != self._start.epoch:
            return self.gone("superseded")
        if progress.preemptions != self._start.preemptions:
            return self.gone("preempted")
        return None

    def _copy(self, progress: Progress | None) -> Effect:
        """The next blocks to send, or what follows when enough has been sent."""
        over = self._check(progress)
        if over is not None or progress is None:
            return over or self.gone()
        if self._held is not None:
            return self._commit(progress, self._held)
        full = progress.computed // self.limits.block_size
        if self._sent >= self._stage_end:  # a stage is over: the next one sends what has become full meanwhile
            if full - self._sent <= self.limits.last_stage_blocks or self.stages >= self.limits.max_stages:
                return Hold(self._sent, copy=True)
            self.stages += 1
            self._stage_end = full
        count = min(self._stage_end - self._sent, self.limits.chunk_blocks)
        return Send(self._sent, count, self._promise(progress))

    def _commit(self, progress: Progress, computed: int) -> Effect:
        """The rest goes with Commit if it is little enough; what is more goes before."""
        # What the destination has, from its own cache perhaps, is not computed there again: others may be reading it.
        there = min(self._sent * self.limits.block_size, progress.length - 1)
        if self.mechanism is Mechanism.RECOMPUTE:
            computed = there
        elif self.mechanism is Mechanism.REQUEUE:
            computed = 0
        else:
            computed = max(computed, there)
        left = max(0, self._blocks(computed) - self._sent)
        if left > (self.limits.commit_blocks or self.limits.chunk_blocks):
            return Send(self._sent, min(left, self.limits.chunk_blocks), self._promise(progress))
        if self._reserved and self._blocks(progress.length) > self._promised:
            return Reserve(self._promise(progress))  # it may say no: better now than to COMMIT
        self.blocks_sent += left
        self._committed = True
        resume, move = progress.epoch
        return Commit((resume, move + 1), computed, self._sent, left, self._reserved)

    def _promise(self, progress: Progress) -> int:
        """The room to ask for: a block more than the request has now, because it goes on growing."""
        self._promised = self._blocks(progress.length) + 1
        return self._promised

    def _blocks(self, length: int) -> int:
        """Blocks that hold a sequence of this length."""
        return -(-length // self.limits.block_size)
