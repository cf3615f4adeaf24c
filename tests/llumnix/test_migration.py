"""Every transition of the source's state machine of a move."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from llumnix.migration import (
    Commit,
    Effect,
    End,
    Hold,
    Limits,
    Mechanism,
    Outcome,
    Outgoing,
    Progress,
    Reserve,
    Send,
)

SIZE = 4
LIMITS = Limits(SIZE, chunk_blocks=4, last_stage_blocks=1, max_stages=3)
RUNNING = Progress(running=True, length=42, computed=41, epoch=(2, 5), preemptions=1)  # 10 full blocks, 11 in all


def grown(tokens: int, progress: Progress = RUNNING) -> Progress:
    return replace(progress, length=progress.length + tokens, computed=progress.computed + tokens)


def machine(
    mechanism: Mechanism = Mechanism.LIVE, limits: Limits = LIMITS, present: int = 0
) -> tuple[Outgoing, Effect]:
    """A move whose reservation was answered."""
    outgoing = Outgoing(limits, mechanism)
    assert outgoing.start(RUNNING) == Reserve(12)
    return outgoing, outgoing.reserved(present, RUNNING)


def committing(mechanism: Mechanism = Mechanism.LIVE) -> Outgoing:
    """A move whose last effect was Commit."""
    outgoing, effect = machine(mechanism)
    for _ in range(20):
        if isinstance(effect, Send):
            effect = outgoing.sent(effect.count, RUNNING)
        elif isinstance(effect, Hold):
            effect = outgoing.held(RUNNING)
        else:
            break
    assert isinstance(effect, Commit)
    return outgoing


# -- the whole way ----------------------------------------------------------------------------------------------


def test_blocks_are_copied_in_stages_then_the_request_is_held_and_given() -> None:
    outgoing, effect = machine()
    assert effect == Send(0, 4, 12)
    assert outgoing.sent(4, grown(1)) == Send(4, 4, 12)
    assert outgoing.sent(4, grown(3)) == Send(8, 2, 13)  # what was full when the stage began: 10 blocks
    assert outgoing.sent(2, grown(9)) == Send(10, 2, 14)  # a second stage: 50 computed, 12 full blocks
    assert outgoing.sent(2, grown(10)) == Hold(12, copy=True)  # one unfinished block is left
    assert outgoing.held(grown(11)) == Commit((2, 6), 52, 12, 1, True)
    assert outgoing.owned() == End(Outcome.MOVED)
    assert (outgoing.stages, outgoing.blocks_sent, outgoing.blocks_skipped) == (2, 13, 0)


def test_blocks_the_destination_has_are_skipped() -> None:
    outgoing, effect = machine(present=7)
    assert effect == Send(7, 3, 12)
    assert outgoing.blocks_skipped == 7
    outgoing, effect = machine(present=10)
    assert effect == Hold(10, copy=True)
    assert outgoing.held(RUNNING) == Commit((2, 6), 41, 10, 1, True)
    assert (outgoing.stages, outgoing.blocks_sent, outgoing.blocks_skipped) == (0, 1, 10)


def test_stages_end_when_there_have_been_enough() -> None:
    outgoing, effect = machine(limits=replace(LIMITS, chunk_blocks=64))
    stages, length = 0, 0
    while isinstance(effect, Send):
        stages, length = stages + 1, length + 20  # it grows faster than it is copied
        effect = outgoing.sent(effect.count, grown(length))
    assert (stages, outgoing.stages) == (3, 3)
    assert effect == Hold(20, copy=True)
    assert outgoing.held(grown(length)) == Reserve(27)  # it has outgrown what the last stage asked for
    assert outgoing.reserved(20, grown(length)) == Commit((2, 6), 101, 20, 6, True)


def test_what_is_left_after_the_hold_goes_ahead_of_commit_if_it_is_more_than_one_transfer() -> None:
    outgoing, effect = machine(Mechanism.STOP_AND_COPY)
    assert effect == Hold(0, copy=True)
    assert outgoing.held(RUNNING) == Send(0, 4, 12)
    assert outgoing.sent(4, RUNNING) == Send(4, 4, 12)
    assert outgoing.sent(4, RUNNING) == Commit((2, 6), 41, 8, 3, True)
    assert outgoing.blocks_sent == 11


def test_without_copies_only_what_the_destination_has_counts_as_computed() -> None:
    outgoing, effect = machine(Mechanism.RECOMPUTE, present=6)
    assert effect == Hold(6, copy=False)
    assert outgoing.held(RUNNING) == Commit((2, 6), 24, 6, 0, True)
    outgoing, _ = machine(Mechanism.RECOMPUTE, present=10)
    assert outgoing.held(replace(RUNNING, computed=38)) == Commit((2, 6), 40, 10, 0, True)


@pytest.mark.parametrize("mechanism", [Mechanism.LIVE, Mechanism.STOP_AND_COPY, Mechanism.RECOMPUTE])
def test_blocks_that_the_destination_has_beyond_the_source_are_not_computed_again(mechanism: Mechanism) -> None:
    """The source drains in the middle of a prefill; the destination has the prefix, and others may be reading it."""
    prefilling = replace(RUNNING, computed=9)
    outgoing = Outgoing(LIMITS, mechanism)
    outgoing.start(prefilling)
    assert outgoing.reserved(7, prefilling) == Hold(7, copy=mechanism is not Mechanism.RECOMPUTE)
    assert outgoing.held(prefilling) == Commit((2, 6), 28, 7, 0, True)
    outgoing = Outgoing(LIMITS, mechanism)
    outgoing.start(prefilling)
    outgoing.reserved(11, prefilling)
    assert outgoing.held(prefilling) == Commit((2, 6), 41, 11, 0, True), "the newest position is always computed"


@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_a_queued_request_moves_without_room_and_without_blocks(mechanism: Mechanism) -> None:
    outgoing = Outgoing(LIMITS, mechanism)
    queued = replace(RUNNING, running=False, computed=0)
    assert outgoing.start(queued) == Reserve(0)  # whether it may queue there at all
    assert outgoing.mechanism is Mechanism.REQUEUE
    assert outgoing.reserved(0, queued) == Hold(0, copy=False)
    assert outgoing.held(queued) == Commit((2, 6), 0, 0, 0, False)


def test_a_running_request_may_be_queued_elsewhere() -> None:
    outgoing = Outgoing(LIMITS, Mechanism.REQUEUE)
    assert outgoing.start(RUNNING) == Reserve(0)
    assert outgoing.reserved(0, RUNNING) == Hold(0, copy=False)
    assert outgoing.held(RUNNING) == Commit((2, 6), 0, 0, 0, False)


def test_what_was_chosen_because_it_is_queued_stays_once_it_has_started() -> None:
    queued = replace(RUNNING, running=False, computed=0)
    started = End(Outcome.ABORTED, "started")
    assert Outgoing(LIMITS, queued=True).start(RUNNING) == started
    assert Outgoing(LIMITS, Mechanism.REQUEUE, queued=True).start(RUNNING) == started
    outgoing = Outgoing(LIMITS, Mechanism.REQUEUE, queued=True)
    outgoing.start(queued)
    assert outgoing.reserved(0, queued) == Hold(0, copy=False)
    assert outgoing.held(RUNNING) == started


def test_who_takes_no_such_request_says_so_before_a_queued_one_is_held() -> None:
    outgoing = Outgoing(LIMITS)
    outgoing.start(replace(RUNNING, running=False, computed=0))
    assert outgoing.refused("the engine is draining") == End(Outcome.ABORTED, "the engine is draining")


def test_room_for_what_has_grown_since_is_asked_for_before_commit() -> None:
    outgoing, effect = machine(Mechanism.STOP_AND_COPY, replace(LIMITS, chunk_blocks=64))
    assert effect == Hold(0, copy=True)
    assert outgoing.held(grown(6)) == Commit((2, 6), 47, 0, 12, True)  # 48 tokens: 12 blocks are promised
    outgoing, _ = machine(Mechanism.STOP_AND_COPY, replace(LIMITS, chunk_blocks=64))
    assert outgoing.held(grown(7)) == Reserve(14)  # 49 tokens
    assert outgoing.reserved(0, grown(7)) == Commit((2, 6), 48, 0, 12, True)
    outgoing, _ = machine(Mechanism.RECOMPUTE, present=3)
    assert outgoing.held(grown(7)) == Reserve(14)
    assert outgoing.refused("no room") == End(Outcome.ABORTED, "no room", release=True)
    assert outgoing.blocks_skipped == 3


# -- every end --------------------------------------------------------------------------------------------------


def test_a_request_that_is_not_there_does_not_move() -> None:
    assert Outgoing(LIMITS).start(None) == End(Outcome.ABORTED, "gone")


def test_a_reservation_that_is_refused_leaves_nothing_to_take_back() -> None:
    outgoing = Outgoing(LIMITS)
    outgoing.start(RUNNING)
    assert outgoing.refused("full") == End(Outcome.ABORTED, "full", release=False)


def test_a_reservation_that_is_not_answered_is_taken_back() -> None:
    outgoing = Outgoing(LIMITS)
    outgoing.start(RUNNING)
    assert outgoing.silent("timeout") == End(Outcome.ABORTED, "timeout", release=True)


def test_failures_of_copies_leave_the_request_where_it_is() -> None:
    for fail in (Outgoing.refused, Outgoing.silent):
        outgoing, _ = machine()
        assert fail(outgoing, "why") == End(Outcome.ABORTED, "why", release=True)
        outgoing, _ = machine(present=10)
        outgoing.held(replace(RUNNING, computed=60, length=61))  # more than one transfer: held, not committed
        assert fail(outgoing, "why") == End(Outcome.ABORTED, "why", release=True)


CHANGES = [
    (None, "gone"),
    (replace(RUNNING, epoch=(3, 5)), "superseded"),
    (replace(RUNNING, preemptions=2), "preempted"),
]


@pytest.mark.parametrize(("progress", "reason"), CHANGES)
@pytest.mark.parametrize("mechanism", [Mechanism.LIVE, Mechanism.STOP_AND_COPY, Mechanism.RECOMPUTE])
def test_a_request_that_has_changed_is_left_alone(mechanism: Mechanism, progress: Progress | None, reason: str) -> None:
    end = End(Outcome.ABORTED, reason, release=True)
    outgoing = Outgoing(LIMITS, mechanism)
    outgoing.start(RUNNING)
    assert outgoing.reserved(0, progress) == end
    outgoing, _ = machine(mechanism)
    if mechanism is Mechanism.LIVE:
        assert outgoing.sent(4, progress) == end
    elif progress is not None:
        assert outgoing.held(progress) == end


@pytest.mark.parametrize(("progress", "reason"), CHANGES)
def test_a_held_request_may_still_be_dropped(progress: Progress | None, reason: str) -> None:
    outgoing, _ = machine(Mechanism.STOP_AND_COPY)
    outgoing.held(RUNNING)
    assert outgoing.sent(4, progress) == End(Outcome.ABORTED, reason, release=True)


def test_a_move_that_is_called_off_gives_its_promise_back() -> None:
    outgoing = Outgoing(LIMITS)
    outgoing.start(RUNNING)
    assert outgoing.gone() == End(Outcome.ABORTED, "gone", release=False)
    outgoing, _ = machine()
    assert outgoing.gone("enough") == End(Outcome.ABORTED, "enough", release=True)


@pytest.mark.parametrize("mechanism", [Mechanism.LIVE, Mechanism.STOP_AND_COPY, Mechanism.RECOMPUTE])
def test_after_commit_nothing_brings_the_request_back(mechanism: Mechanism) -> None:
    assert committing(mechanism).owned() == End(Outcome.MOVED)
    assert committing(mechanism).refused("full") == End(Outcome.REFUSED, "full")
    assert committing(mechanism).silent("timeout") == End(Outcome.UNCONFIRMED, "timeout")
    with pytest.raises(AssertionError):
        committing(mechanism).gone()


def test_a_commit_that_was_not_sent_is_none() -> None:
    outgoing = committing()
    assert outgoing.called_off() == End(Outcome.ABORTED, "gone", release=True)
    assert outgoing.silent("timeout") == End(Outcome.ABORTED, "timeout", release=True)


# -- any way ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(300))
def test_every_way_ends_and_sends_each_block_once(seed: int) -> None:
    random = Random(seed)
    limits = Limits(random.choice((1, 4, 16)), random.randrange(2, 9), 1, random.randrange(1, 5))
    mechanism = random.choice(list(Mechanism))
    outgoing = Outgoing(limits, mechanism)
    length = random.randrange(2, 200)
    progress = Progress(True, length, length - 1, (0, 0), 0)
    blocks, held, promised = 0, False, 0  # what the destination has, whether the request stands still, its room
    effect = outgoing.start(progress)
    for _ in range(1000):
        if not held:
            progress = grown(random.randrange(4), progress)
        match effect:
            case Reserve(num_blocks=room):
                assert room > promised or mechanism is Mechanism.REQUEUE
                promised = room
                if not blocks:
                    blocks = random.randrange(progress.computed // limits.block_size + 1)
                effect = outgoing.reserved(blocks, progress)
            case Send(first=first, count=count, num_blocks=room):
                promised = max(promised, room)
                assert first == blocks and 0 < count <= limits.chunk_blocks and first + count <= promised
                assert held or (first + count) * limits.block_size <= progress.computed  # full ones only
                blocks += count
                effect = outgoing.sent(count, progress)
            case Hold(first=first, copy=copy):
                assert not held and (first == blocks or not copy)
                held = True
                effect = outgoing.held(progress)
            case Commit() as commit:
                assert held and commit.epoch == (0, 1)
                if commit.reserved:
                    assert commit.first == blocks and commit.count <= limits.chunk_blocks
                    assert blocks + commit.count >= -(-commit.computed // limits.block_size)
                    assert promised * limits.block_size >= progress.length
                if mechanism in (Mechanism.LIVE, Mechanism.STOP_AND_COPY):
                    assert commit.computed == progress.computed
                effect = outgoing.owned()
            case End(outcome=outcome):
                assert outcome is Outcome.MOVED
                return
    pytest.fail("it never ends")
