"""The ingress's side of a request: rules one by one, then a network that does its worst."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.messages import (
    CLOSING,
    DRAINED,
    DRAINING,
    ENGINE_LOST,
    FAILED,
    INVALID,
    LEASE,
    NO_ENGINE,
    QUEUE_FULL,
    QUEUE_TIMEOUT,
    TIMEOUT,
    UNKNOWN,
    error_output,
)
from serving.outbox import Outboxes
from serving.tracker import Abort, Dispatch, Effect, Emit, Replay, Send, Tracker, TrackerConfig

PARAMS = {"max_tokens": 8}
FAR = 1e9


def token(index: int, epoch: tuple[int, int] = (0, 0), request_id: str = "r", **rest: Any) -> dict[str, Any]:
    return {"id": request_id, "epoch": list(epoch), "index": index, "token": 50 + index, **rest}


def error(kind: str, epoch: tuple[int, int] = (0, 0), request_id: str = "r") -> dict[str, Any]:
    return error_output(request_id, epoch, kind, "why")


def tracked(engine: str = "a", tokens: int = 0, **config: Any) -> Tracker:
    """A tracker with request r at an engine that has sent some tokens, at time 0."""
    tracker = Tracker("ingress", TrackerConfig(**config))
    tracker.start("r", [1, 2], PARAMS, 0, FAR)
    tracker.assigned("r", engine, 0.0)
    effects = tracker.outputs(engine, [token(n) for n in range(tokens)], 0.0)
    assert [kind(e) for e in effects] == ["Emit"] * tokens
    return tracker


def kind(effect: Effect) -> str:
    return type(effect).__name__


def emitted(effects: list[Effect]) -> list[int]:
    return [e.output["index"] for e in effects if isinstance(e, Emit)]


def ended_with(effects: list[Effect]) -> str:
    """The error of the only effect."""
    assert len(effects) == 1 and isinstance(effects[0], Emit), effects
    return str(effects[0].output["error"])


def resumed_elsewhere(tracker: Tracker, effects: list[Effect], engine: str, now: float) -> dict[str, Any]:
    """Answer the Dispatch among the effects; returns the submission."""
    assert [e for e in effects if isinstance(e, Dispatch)], effects
    (send,) = tracker.assigned("r", engine, now)
    assert isinstance(send, Send) and send.engine == engine
    return send.message


# Submission


def test_a_request_is_dispatched_sent_and_its_tokens_are_emitted_up_to_the_end() -> None:
    tracker = Tracker("ingress")
    assert tracker.start("r", [1, 2], PARAMS, -1, FAR) == [Dispatch("r", frozenset())]
    assert tracker.assigned("r", "a", 0.0) == [
        Send(
            "a",
            {
                "id": "r",
                "client": "ingress",
                "prompt": [1, 2],
                "params": PARAMS,
                "priority": -1,
                "epoch": [0, 0],
                "output": [],
            },
        )
    ]
    last = token(1, finish="stop")
    assert tracker.outputs("a", [token(0), last], 1.0) == [Emit("r", token(0)), Emit("r", last)]
    assert not tracker.requests
    assert tracker.outputs("a", [last], 1.0) == [], "a repeated end is nobody's business"


def test_answers_for_requests_that_are_gone_do_nothing() -> None:
    tracker = tracked()
    tracker.cancel("r")
    assert tracker.assigned("r", "a", 0.0) == [] and tracker.unassigned("r", 0.0) == []
    assert tracker.send_failed("a", "r", (0, 0), 0.0) == [] and tracker.engine_lost("a", 0.0) == []
    assert tracker.cancel("r") == [] and tracker.tick(1.0) == []


def test_a_full_queue_is_told_at_once_when_nobody_else_is_left() -> None:
    tracker = tracked()
    (dispatch,) = tracker.outputs("a", [error(QUEUE_FULL)], 0.0)
    assert dispatch == Dispatch("r", frozenset({"a"}))
    assert ended_with(tracker.unassigned("r", 0.0)) == QUEUE_FULL


def test_refusals_are_no_resumes_and_exclude_the_engine() -> None:
    tracker = tracked(max_resumes=0)
    effects = tracker.outputs("a", [error(DRAINING)], 0.0)
    message = resumed_elsewhere(tracker, effects, "b", 0.0)
    effects = tracker.outputs("b", [error(QUEUE_FULL, tuple(message["epoch"]))], 0.0)
    assert effects == [Dispatch("r", frozenset({"a", "b"}))]
    assert tracker.resumed == 0


def test_a_resumed_request_waits_for_room_instead_of_ending_with_a_full_queue() -> None:
    tracker = tracked(tokens=3)
    message = resumed_elsewhere(tracker, tracker.outputs("a", [error(FAILED)], 0.0), "b", 0.0)
    assert message["output"] == [50, 51, 52]
    tracker.outputs("b", [error(QUEUE_FULL, (1, 0))], 0.0)
    assert tracker.unassigned("r", 0.0) == []
    assert tracker.tick(0.2) == [Dispatch("r", frozenset())], "engines that refused are asked again"


@pytest.mark.parametrize("what", [QUEUE_FULL, DRAINING])
@pytest.mark.parametrize("engines", [1, 3])
def test_a_request_that_everyone_refuses_asks_ever_more_seldom_and_not_for_ever(what: str, engines: int) -> None:
    tracker = tracked(tokens=3, no_engine_s=30.0)
    effects: list[Effect] = list(tracker.outputs("a", [error(FAILED)], 0.0))
    now, asked, ended = 0.0, list[float](), None
    while ended is None and now < 60.0:
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, Dispatch):
                left = [name for name in "abc"[:engines] if name not in effect.exclude]
                effects += tracker.assigned("r", left[0], now) if left else tracker.unassigned("r", now)
            elif isinstance(effect, Send):
                asked.append(now)
                effects += tracker.outputs(effect.engine, [error(what, tuple(effect.message["epoch"]))], now)
            else:
                ended = ended_with([effect])
        now += 0.05
        effects = tracker.tick(now)
    assert ended == NO_ENGINE and 30.0 <= now < 31.5
    assert len(asked) < 40 * engines
    late = [b - a for a, b in zip(asked, asked[1:], strict=False) if a > 5 and b > a]
    assert late and min(late) > 0.9


def test_a_token_or_a_lost_engine_begins_the_wait_for_an_engine_anew() -> None:
    tracker = tracked(no_engine_s=30.0)
    assert resumed_elsewhere(tracker, tracker.outputs("a", [error(DRAINING)], 0.0), "a", 0.0)["epoch"] == [1, 0]
    tracker.outputs("a", [error(DRAINING, (1, 0))], 0.0)
    assert tracker.unassigned("r", 0.0) == []
    resumed_elsewhere(tracker, tracker.tick(0.2), "a", 0.2)
    tracker.outputs("a", [error(DRAINED, (2, 0))], 40.0)  # it was in that engine's queue meanwhile
    assert tracker.unassigned("r", 40.0) == []
    resumed_elsewhere(tracker, tracker.tick(40.2), "a", 40.2)
    tracker.outputs("a", [token(0, (3, 0))], 60.0)
    tracker.outputs("a", [error(DRAINING, (3, 0))], 80.0)
    assert tracker.unassigned("r", 80.0) == [] and "r" in tracker.requests


def test_without_engines_a_request_waits_for_one_but_not_for_ever() -> None:
    tracker = Tracker("ingress", TrackerConfig(no_engine_s=30.0))
    tracker.start("r", [1], PARAMS, 0, FAR)
    now, ended = 0.0, None
    assert tracker.unassigned("r", now) == []
    while ended is None and now < 100:
        now += 0.05
        for effect in tracker.tick(now):
            assert isinstance(effect, Dispatch)
            for answer in tracker.unassigned("r", now):
                ended = ended_with([answer])
    assert ended == NO_ENGINE and 30.0 <= now < 30.5


def test_a_submission_that_did_not_arrive_is_made_again_with_a_new_epoch() -> None:
    tracker = tracked()
    assert tracker.send_failed("a", "r", (0, 0), 1.0) == []
    assert tracker.tick(1.1) == []
    message = resumed_elsewhere(tracker, tracker.tick(1.3), "a", 1.3)
    assert message["epoch"] == [1, 0]


def test_a_failed_submission_to_a_former_owner_changes_nothing() -> None:
    tracker = tracked("b")
    assert tracker.send_failed("a", "r", (0, 0), 1.0) == [] and tracker.tick(5.0) == []


# Tokens


def test_repeats_are_ignored() -> None:
    tracker = tracked(tokens=3)
    assert tracker.outputs("a", [token(0), token(2), token(1)], 0.0) == []
    assert emitted(tracker.outputs("a", [token(3)], 0.0)) == [3]


def test_a_gap_is_asked_for_once_and_filled_by_the_answer() -> None:
    tracker = tracked(tokens=1)
    assert tracker.outputs("a", [token(2)], 0.0) == [Replay("a", "r", 1)]
    assert tracker.outputs("a", [token(3)], 0.1) == []
    assert emitted(tracker.outputs("a", [token(n) for n in (1, 2, 3)], 0.2)) == [1, 2, 3]
    assert tracker.tick(5.0) == []


def test_a_gap_at_the_end_is_asked_for_again_although_nothing_more_comes() -> None:
    tracker = tracked(tokens=1, replay_s=1.0)
    last = token(2, finish="stop")
    assert tracker.outputs("a", [last], 0.0) == [Replay("a", "r", 1)]
    assert tracker.tick(0.5) == []
    assert tracker.tick(1.1) == [Replay("a", "r", 1)]
    assert emitted(tracker.outputs("a", [token(1), last], 1.2)) == [1, 2]


def test_a_gap_that_is_never_filled_ends_in_a_resume() -> None:
    tracker = tracked(tokens=1, replay_s=1.0, max_replays=3)
    effects = tracker.outputs("a", [token(2)], 0.0)
    now = 0.0
    while not any(isinstance(e, Dispatch) for e in effects) and now < 20:
        now += 0.5
        effects += tracker.tick(now)
    assert [kind(e) for e in effects] == ["Replay", "Replay", "Replay", "Abort", "Dispatch"]
    assert effects[3] == Abort("a", "r", (0, 0))
    assert resumed_elsewhere(tracker, effects, "b", now)["output"] == [50]


def test_outputs_of_unknown_requests_make_their_engine_stop() -> None:
    tracker = Tracker("ingress")
    assert tracker.outputs("a", [token(4, (2, 1), "x")], 0.0) == [Abort("a", "x", (2, 1))]
    assert tracker.outputs("a", [error(LEASE, (2, 1), "x"), token(5, (2, 1), "x", finish="stop")], 0.0) == []


# Ownership


def test_the_first_output_of_a_move_makes_a_new_owner_and_stops_the_old_one() -> None:
    tracker = tracked(tokens=2)
    effects = tracker.outputs("b", [token(2, (0, 1))], 0.0)
    assert effects == [Abort("a", "r", (0, 0)), Emit("r", token(2, (0, 1)))]
    assert tracker.cursors("b") == {"r": 3} and tracker.cursors("a") == {}


def test_a_destination_that_is_faster_than_its_source_leaves_no_gap() -> None:
    """Its first item repeats from the index last acknowledged; the source's last tokens come later."""
    tracker = tracked(tokens=2)
    effects = tracker.outputs("b", [token(n, (0, 1)) for n in (1, 2, 3)], 0.0)
    assert emitted(effects) == [2, 3]
    assert tracker.outputs("a", [token(2), token(3)], 0.0) == [Abort("a", "r", (0, 0))] * 2


def test_a_token_at_the_cursor_is_taken_whatever_its_epoch_and_its_engine_is_stopped() -> None:
    tracker = tracked(tokens=2)
    tracker.outputs("b", [token(1, (0, 1))], 0.0)
    assert tracker.outputs("a", [token(2)], 0.0) == [Abort("a", "r", (0, 0)), Emit("r", token(2))]
    assert tracker.cursors("b") == {"r": 3}


def test_an_end_from_a_former_owner_counts_and_stops_the_present_one() -> None:
    tracker = tracked(tokens=2)
    tracker.outputs("b", [token(1, (0, 1))], 0.0)
    last = token(2, finish="stop")
    assert tracker.outputs("a", [last], 0.0) == [Emit("r", last), Abort("b", "r", (0, 1))]
    assert not tracker.requests


def test_an_early_end_from_a_former_owner_is_not_the_end() -> None:
    tracker = tracked(tokens=2)
    tracker.outputs("b", [token(1, (0, 1))], 0.0)
    assert tracker.outputs("a", [token(5, finish="stop")], 0.0) == []
    assert "r" in tracker.requests


@pytest.mark.parametrize("what", [LEASE, FAILED, DRAINED, INVALID, QUEUE_FULL, QUEUE_TIMEOUT, DRAINING])
def test_errors_of_a_former_owner_are_old_news(what: str) -> None:
    tracker = tracked(tokens=1)
    tracker.outputs("b", [token(1, (0, 1))], 0.0)
    assert tracker.outputs("a", [error(what)], 5.0) == []
    assert tracker.cursors("b") == {"r": 2}


def test_a_repeated_refusal_does_not_disturb_the_engine_that_took_the_request() -> None:
    tracker = tracked()
    resumed_elsewhere(tracker, tracker.outputs("a", [error(QUEUE_FULL)], 0.0), "b", 0.0)
    assert tracker.outputs("a", [error(QUEUE_FULL)], 0.0) == []
    assert tracker.cursors("b") == {"r": 0}


def test_every_submission_has_an_epoch_of_its_own() -> None:
    tracker = tracked()
    epochs = [(0, 0)]
    for what in (QUEUE_FULL, LEASE, DRAINING, FAILED):
        effects = tracker.outputs("a", [error(what, epochs[-1])], 5.0)
        epochs.append(tuple(resumed_elsewhere(tracker, effects, "a", 5.0)["epoch"]))
    assert epochs == sorted(set(epochs)) and len(epochs) == 5


def test_a_resume_keeps_above_every_move_seen() -> None:
    tracker = tracked(tokens=1)
    tracker.outputs("b", [token(1, (0, 4))], 0.0)
    message = resumed_elsewhere(tracker, tracker.outputs("b", [error(LEASE, (0, 4))], 0.0), "c", 0.0)
    assert tuple(message["epoch"]) > (0, 4)


# Lost engines


def test_a_lost_engines_request_looks_first_and_then_resumes_with_its_tokens() -> None:
    tracker = tracked(tokens=2, look_s=0.2)
    assert tracker.engine_lost("a", 1.0) == [] and tracker.cursors("a") == {}
    assert tracker.tick(1.1) == []
    message = resumed_elsewhere(tracker, tracker.tick(1.25), "b", 1.25)
    assert message["output"] == [50, 51] and message["epoch"] == [1, 0] and tracker.resumed == 1


def test_a_request_that_had_moved_is_found_while_looking() -> None:
    tracker = tracked(tokens=2)
    tracker.engine_lost("a", 1.0)
    assert tracker.outputs("b", [token(2, (0, 1))], 1.1) == [Emit("r", token(2, (0, 1)))]
    assert tracker.tick(2.0) == [] and tracker.resumed == 0


def test_late_tokens_of_a_lost_engine_count_but_it_is_not_trusted_again() -> None:
    """It may be dead, and they came out of a buffer: nobody would ever hear of its end."""
    tracker = tracked(tokens=2)
    tracker.engine_lost("a", 1.0)
    assert tracker.outputs("a", [token(1), token(2)], 1.1) == [Emit("r", token(2))]
    assert tracker.outputs("a", [error(QUEUE_TIMEOUT)], 1.1) == []
    assert resumed_elsewhere(tracker, tracker.tick(1.3), "b", 1.3)["output"] == [50, 51, 52]


def test_a_lost_engine_may_still_bring_the_end() -> None:
    tracker = tracked(tokens=2)
    tracker.engine_lost("a", 1.0)
    last = token(2, finish="stop")
    assert tracker.outputs("a", [last], 1.1) == [Emit("r", last)]
    assert tracker.tick(2.0) == [] and not tracker.requests


def test_a_cut_engine_is_stopped_when_it_comes_back_after_the_resume() -> None:
    tracker = tracked(tokens=2)
    tracker.engine_lost("a", 1.0)
    resumed_elsewhere(tracker, tracker.tick(2.0), "b", 2.0)
    assert tracker.outputs("a", [token(2), token(3)], 2.1) == [
        Abort("a", "r", (0, 0)),
        Emit("r", token(2)),
        Abort("a", "r", (0, 0)),
        Emit("r", token(3)),
    ]
    assert tracker.outputs("b", [token(2, (1, 0)), token(3, (1, 0))], 2.2) == []
    assert emitted(tracker.outputs("b", [token(4, (1, 0))], 2.3)) == [4]


def test_only_the_lost_engines_requests_are_touched() -> None:
    tracker = tracked()
    tracker.start("s", [1], PARAMS, 0, FAR)
    tracker.assigned("s", "b", 0.0)
    tracker.engine_lost("b", 0.0)
    assert tracker.tick(1.0) == [Dispatch("s", frozenset())]


@pytest.mark.parametrize("what", [LEASE, DRAINED, FAILED, UNKNOWN])
def test_errors_of_the_engine_are_a_reason_to_resume_not_to_fail(what: str) -> None:
    tracker = tracked(tokens=1)
    (dispatch,) = tracker.outputs("a", [error(what)], 5.0)
    assert dispatch == Dispatch("r", frozenset({"a"} if what in (DRAINED, FAILED) else ()))
    assert tracker.requests["r"].epoch == (1, 0)


@pytest.mark.parametrize("what", [INVALID, QUEUE_TIMEOUT, CLOSING])
def test_errors_of_the_request_end_it(what: str) -> None:
    tracker = tracked()
    (effect,) = tracker.outputs("a", [error(what)], 0.0)
    assert ended_with([effect]) == what
    assert isinstance(effect, Emit) and effect.output["message"] == "why" and not tracker.requests


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_resumes_are_bounded(limit: int) -> None:
    tracker = tracked(max_resumes=limit)
    for count in range(limit):
        resumed_elsewhere(tracker, tracker.outputs("a", [error(FAILED, (count, 0))], 0.0), "a", 0.0)
    assert ended_with(tracker.outputs("a", [error(FAILED, (limit, 0))], 0.0)) == ENGINE_LOST
    assert tracker.resumed == limit


def test_draining_replicas_do_not_use_up_the_resumes() -> None:
    tracker = tracked(max_resumes=1)
    for count in range(5):
        resumed_elsewhere(tracker, tracker.outputs("a", [error(DRAINED, (count, 0))], 0.0), "a", 0.0)
    assert tracker.requests["r"].resumes == 0 and tracker.resumed == 5
    resumed_elsewhere(tracker, tracker.outputs("a", [error(FAILED, (5, 0))], 0.0), "a", 0.0)
    assert ended_with(tracker.outputs("a", [error(FAILED, (6, 0))], 0.0)) == ENGINE_LOST


def test_an_engine_that_refused_once_is_asked_again_after_the_next_token() -> None:
    tracker = tracked()
    (dispatch,) = tracker.outputs("a", [error(QUEUE_FULL)], 0.0)
    assert dispatch == Dispatch("r", frozenset({"a"}))
    tracker.assigned("r", "b", 0.0)
    tracker.outputs("b", [token(0, epoch=(1, 0))], 1.0)
    (dispatch,) = tracker.outputs("b", [error(FAILED, (1, 0))], 3600.0)
    assert dispatch == Dispatch("r", frozenset({"b"}))


def test_a_late_failure_of_an_earlier_submission_means_nothing() -> None:
    tracker = tracked()
    tracker.outputs("a", [error(FAILED)], 0.0)
    tracker.assigned("r", "a", 0.0)
    assert tracker.send_failed("a", "r", (0, 0), 0.0) == [] and tracker.owners() == {"a"}
    assert tracker.send_failed("a", "r", (1, 0), 0.0) == [] and tracker.owners() == set()


def test_unknown_is_believed_only_of_the_owner_and_not_just_after_a_submission() -> None:
    """Its epoch says nothing: it answers a renewal, which may have overtaken a submission or a move."""
    tracker = tracked(settle_s=1.0)
    infinite = (2**31, 0)
    assert tracker.outputs("a", [error(UNKNOWN, infinite)], 0.5) == []
    assert tracker.outputs("b", [error(UNKNOWN, infinite)], 5.0) == []
    assert tracker.cursors("a") == {"r": 0} and tracker.requests["r"].epoch == (0, 0)
    assert tracker.outputs("a", [error(UNKNOWN, infinite)], 5.0) == [Dispatch("r", frozenset())]
    assert tracker.requests["r"].epoch == (1, 0)


# Cancelling and deadlines


def test_cancelling_stops_the_owner() -> None:
    tracker = tracked(tokens=2)
    assert tracker.cancel("r") == [Abort("a", "r", (0, 0))]
    assert tracker.outputs("a", [token(2)], 0.0) == [Abort("a", "r", (0, 0))]
    assert tracker.outputs("a", [token(3, finish="stop")], 0.0) == []


def test_cancelling_while_nobody_owns_it_stops_whoever_shows_it_later() -> None:
    tracker = tracked(tokens=2)
    tracker.engine_lost("a", 0.0)
    assert tracker.cancel("r") == [] and tracker.tick(5.0) == []
    assert tracker.outputs("b", [token(2, (0, 1))], 0.0) == [Abort("b", "r", (0, 1))]


def test_the_deadline_ends_a_request_in_any_state() -> None:
    for state in ("running", "lost", "waiting"):
        tracker = Tracker("ingress")
        tracker.start("r", [1], PARAMS, 0, 10.0)
        if state == "waiting":
            tracker.unassigned("r", 0.0)
        else:
            tracker.assigned("r", "a", 0.0)
        if state == "lost":
            tracker.engine_lost("a", 9.95)
        assert not any(isinstance(e, Emit) for e in tracker.tick(9.99))
        effects = tracker.tick(10.0)
        assert [e for e in effects if isinstance(e, Abort)] == ([Abort("a", "r", (0, 0))] if state == "running" else [])
        assert ended_with([e for e in effects if isinstance(e, Emit)]) == TIMEOUT
        assert not tracker.requests


# Closing


def test_closing_ends_at_once_what_has_no_engine_and_the_rest_in_time() -> None:
    tracker = tracked("a", tokens=1)
    for request_id in ("lost", "waiting"):
        tracker.start(request_id, [1], PARAMS, 0, FAR)
    tracker.assigned("lost", "b", 0.0)
    tracker.engine_lost("b", 0.0)
    tracker.unassigned("waiting", 0.0)
    effects = tracker.close(5.0)
    assert [(e.id, e.output["error"]) for e in effects if isinstance(e, Emit)] == [
        ("lost", CLOSING),
        ("waiting", CLOSING),
    ]
    assert emitted(tracker.outputs("a", [token(1)], 1.0)) == [1], "what runs goes on"
    assert tracker.tick(4.9) == []
    abort, end = tracker.tick(5.0)
    assert abort == Abort("a", "r", (0, 0)) and ended_with([end]) == CLOSING
    assert not tracker.requests


def test_once_closing_nothing_starts_or_goes_elsewhere() -> None:
    for what in (DRAINING, DRAINED, QUEUE_FULL, FAILED):
        tracker = tracked()
        tracker.close(5.0)
        assert ended_with(tracker.start("s", [1], PARAMS, 0, FAR)) == CLOSING
        assert ended_with(tracker.outputs("a", [error(what)], 1.0)) == CLOSING


# A network that does its worst


@dataclass
class FakeEngine:
    """An engine actor's bookkeeping around a source of tokens: real outboxes, no Ray."""

    name: str
    lives: dict[str, tuple[list[int], int]] = field(default_factory=dict)  # id -> (epoch, next index)
    boxes: Outboxes = field(default_factory=lambda: Outboxes(lease_s=5.0))
    alive: bool = True
    cut: bool = False  # alive, but nothing gets through
    full: bool = False
    draining: bool = False
    flight: list[list[dict[str, Any]]] = field(default_factory=list)  # batches on their way to the ingress
    inbox: list[Send | Abort] = field(default_factory=list)  # calls on their way to the engine

    @property
    def reachable(self) -> bool:
        return self.alive and not self.cut


class Network:
    CLIENT = "ingress"

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.config = TrackerConfig(max_resumes=self.rng.choice([0, 2, 6]))
        self.tracker = Tracker(self.CLIENT, self.config)
        self.engines: dict[str, FakeEngine] = {}
        self.emitted: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.deadlines: dict[str, float] = {}
        self.delivered: list[tuple[str, list[dict[str, Any]]]] = []
        self.replays: list[tuple[str, str, int]] = []
        self.submissions: set[tuple[str, tuple[int, int]]] = set()
        self.healed = False
        self.closing = self.rng.random() < 0.1
        for _ in range(self.rng.choice([1, 2, 3])):
            self.new_engine()

    # The truth: the tokens of a request, whoever computes them.

    @staticmethod
    def length(request_id: str) -> int:
        return 1 + random.Random(request_id).randrange(12)

    @staticmethod
    def truth(request_id: str, index: int) -> int:
        return random.Random(f"{request_id}/{index}").randrange(1000)

    # -- what happens -------------------------------------------------------------------------------------------

    def new_engine(self) -> None:
        name = f"e{len(self.engines)}"
        self.engines[name] = FakeEngine(name)

    def start(self) -> None:
        request_id = f"r{len(self.emitted)}"
        self.emitted[request_id] = []
        self.deadlines[request_id] = self.now + self.rng.choice([3.0, 1000.0, 1000.0, 1000.0])
        self.carry_out(self.tracker.start(request_id, [1], PARAMS, 0, self.deadlines[request_id]))

    def step(self, engine: FakeEngine) -> None:
        for request_id, (epoch, index) in list(engine.lives.items()):
            output = {"id": request_id, "epoch": epoch, "index": index, "token": self.truth(request_id, index)}
            if index == self.length(request_id) - 1:
                output["finish"] = "stop"
                del engine.lives[request_id]
            else:
                engine.lives[request_id] = (epoch, index + 1)
            engine.boxes.push(self.CLIENT, [output], self.now)

    def step_all(self) -> None:
        for engine in self.engines.values():
            if engine.alive:
                self.call(engine)
                self.step(engine)

    def renew_all(self) -> None:
        for engine in self.engines.values():
            if engine.alive:
                self.renew(engine)
                self.expire(engine)

    def call(self, engine: FakeEngine) -> None:
        """One call arrives, in order."""
        if not engine.inbox or not engine.alive:
            return
        call = engine.inbox.pop(0)
        if isinstance(call, Abort):
            client = engine.boxes.clients.get(self.CLIENT)
            if client is None or client.open.get(call.id, list(call.epoch)) <= list(call.epoch):
                engine.boxes.closed(self.CLIENT, call.id, self.now)
            if call.id in engine.lives and engine.lives[call.id][0] <= list(call.epoch):
                del engine.lives[call.id]
            return
        message = call.message
        request_id, epoch, output = message["id"], message["epoch"], message["output"]
        assert output == [self.truth(request_id, n) for n in range(len(output))]
        engine.boxes.opened(self.CLIENT, request_id, epoch, self.now)
        refusal = DRAINING if engine.draining else QUEUE_FULL if engine.full else None
        if refusal is not None:
            engine.boxes.push(self.CLIENT, [error_output(request_id, epoch, refusal)], self.now)
            return
        here = engine.lives.get(request_id)
        if here is not None and here[0] >= epoch:
            engine.boxes.push(self.CLIENT, [error_output(request_id, epoch, INVALID, "already here")], self.now)
            return
        engine.lives[request_id] = (epoch, len(output))

    def take(self, engine: FakeEngine) -> None:
        if engine.reachable and (batch := engine.boxes.take(self.CLIENT)):
            engine.flight.append(batch)

    def deliver(self, engine: FakeEngine) -> None:
        if engine.flight:
            late = self.rng.random() < 0.1 and not self.healed
            batch = engine.flight.pop(-1 if late else 0)
            self.delivered.append((engine.name, batch))
            self.carry_out(self.tracker.outputs(engine.name, batch, self.now))

    def repeat(self) -> None:
        if self.delivered:
            name, batch = self.rng.choice(self.delivered)
            self.carry_out(self.tracker.outputs(name, batch, self.now))

    def drop_token(self, engine: FakeEngine) -> None:
        """A gap. The last token of all is spared: only a stream that breaks can lose it."""
        for batch in engine.flight:
            for output in batch:
                if "token" in output and "finish" not in output:
                    batch.remove(output)
                    return

    def reopen(self, engine: FakeEngine) -> None:
        """The stream breaks and is opened again by cursor; what was on its way may be lost."""
        if engine.reachable:
            if self.rng.random() < 0.5:
                engine.flight = []
            engine.flight.append(engine.boxes.replay(self.CLIENT, self.tracker.cursors(engine.name), self.now))

    def cut(self, engine: FakeEngine) -> None:
        engine.cut = True
        self.carry_out(self.tracker.engine_lost(engine.name, self.now))

    def mend(self, engine: FakeEngine) -> None:
        if engine.cut:
            engine.cut = False
            self.reopen(engine)

    def die(self, engine: FakeEngine) -> None:
        if engine.alive:
            engine.alive = False
            lost = [call for call in engine.inbox if isinstance(call, Send)]
            engine.flight = engine.flight[: self.rng.randrange(len(engine.flight) + 1)]
            while engine.flight:  # a stream's items come before its end
                self.deliver(engine)
            self.carry_out(self.tracker.engine_lost(engine.name, self.now))
            for send in lost:
                self.carry_out(
                    self.tracker.send_failed(engine.name, send.message["id"], tuple(send.message["epoch"]), self.now)
                )
            self.new_engine()

    def fail(self, engine: FakeEngine, what: str) -> None:
        """FAILED or DRAINED to everyone; the engine takes nothing new."""
        client = engine.boxes.clients.get(self.CLIENT)
        if engine.alive and client is not None:
            engine.draining = True
            engine.lives.clear()
            lost = [error_output(request_id, epoch, what) for request_id, epoch in client.open.items()]
            engine.boxes.push(self.CLIENT, lost, self.now)

    def move(self, source: FakeEngine, destination: FakeEngine) -> None:
        if source is destination or not source.lives or not destination.alive:
            return
        request_id = self.rng.choice(sorted(source.lives))
        if request_id in destination.lives:
            return
        epoch, index = source.lives.pop(request_id)
        source.boxes.closed(self.CLIENT, request_id, self.now)
        moved = [epoch[0], epoch[1] + 1]
        destination.boxes.opened(self.CLIENT, request_id, moved, self.now)
        destination.lives[request_id] = (moved, index)
        # The first item repeats from the index last acknowledged, which is not above the cursor.
        first = self.rng.randint(0, min(len(self.emitted[request_id]), index))
        repeated = [
            {"id": request_id, "epoch": moved, "index": n, "token": self.truth(request_id, n)}
            for n in range(first, index)
        ]
        destination.boxes.push(self.CLIENT, repeated, self.now)

    def renew(self, engine: FakeEngine) -> None:
        if engine.reachable:
            for request_id in engine.boxes.acknowledge(self.CLIENT, self.tracker.cursors(engine.name), self.now):
                unknown = error_output(request_id, [2**31, 0], UNKNOWN)
                engine.boxes.clients[self.CLIENT].pending.append(unknown)

    def expire(self, engine: FakeEngine) -> None:
        for request_id, epoch in engine.boxes.expire(self.now):
            if request_id in engine.lives and engine.lives[request_id][0] <= epoch:
                del engine.lives[request_id]

    def answer_replay(self) -> None:
        if self.replays:
            name, request_id, start = self.replays.pop(0)
            engine = self.engines[name]
            if engine.reachable and (self.healed or self.rng.random() < 0.7):
                outputs = engine.boxes.replay(self.CLIENT, {request_id: start}, self.now)
                request = self.tracker.requests.get(request_id)
                if not outputs and request is not None and request.engine == name:
                    outputs = [error_output(request_id, request.epoch, UNKNOWN)]
                self.carry_out(self.tracker.outputs(name, outputs, self.now))

    def cancel(self) -> None:
        alive = sorted(self.tracker.requests)
        if alive:
            request_id = self.rng.choice(alive)
            self.ended[request_id] = "cancelled"
            self.carry_out(self.tracker.cancel(request_id))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.tracker.tick(self.now))
        for request in self.tracker.requests.values():
            assert self.now < request.deadline

    # -- effects ------------------------------------------------------------------------------------------------

    def carry_out(self, effects: list[Effect]) -> None:
        todo = list(effects)
        while todo:
            match todo.pop(0):
                case Emit(id=request_id, output=output):
                    self.emit(request_id, output)
                case Dispatch(id=request_id, exclude=exclude):
                    ready = [e.name for e in self.engines.values() if e.reachable and e.name not in exclude]
                    if self.healed:
                        ready = [name for name in ready if not self.engines[name].draining]
                    if ready:
                        todo += self.tracker.assigned(request_id, self.rng.choice(ready), self.now)
                    else:
                        todo += self.tracker.unassigned(request_id, self.now)
                case Send() as send:
                    submission = (send.message["id"], tuple(send.message["epoch"]))
                    assert submission not in self.submissions, "two submissions with one epoch"
                    self.submissions.add(submission)
                    engine = self.engines[send.engine]
                    if engine.reachable and (self.healed or self.rng.random() < 0.95):
                        engine.inbox.append(send)
                    else:
                        todo += self.tracker.send_failed(
                            send.engine, send.message["id"], tuple(send.message["epoch"]), self.now
                        )
                case Abort() as abort:
                    if self.engines[abort.engine].reachable:
                        self.engines[abort.engine].inbox.append(abort)
                case Replay(engine=name, id=request_id, start=start):
                    self.replays.append((name, request_id, start))

    def emit(self, request_id: str, output: dict[str, Any]) -> None:
        assert request_id not in self.ended, "an output after the end"
        got = self.emitted[request_id]
        assert output["index"] == len(got)
        if "token" in output:
            assert output["token"] == self.truth(request_id, len(got))
            got.append(output["token"])
        if "finish" in output:
            assert len(got) == self.length(request_id)
            self.ended[request_id] = output["finish"]
        if "error" in output:
            assert "token" not in output
            assert output["error"] in ("timeout", "engine_lost", "no_engine", QUEUE_FULL, CLOSING)
            assert output["error"] != QUEUE_FULL or not got
            assert output["error"] != CLOSING or self.tracker.closes_at is not None
            self.ended[request_id] = output["error"]

    # -- a run --------------------------------------------------------------------------------------------------

    def run(self, count: int) -> None:
        for _ in range(count):
            self.disturb(self.rng.choice(sorted(self.engines.values(), key=lambda e: e.name)), self.rng.random())
            for request in self.tracker.requests.values():
                assert request.resumes <= self.config.max_resumes
        if self.closing:
            self.carry_out(self.tracker.close(self.now + 1.0))
        self.heal()

    def disturb(self, engine: FakeEngine, chance: float) -> None:
        for limit, action in (
            (0.14, self.start),
            (0.36, self.step_all),
            (0.50, lambda: self.take(engine)),
            (0.66, lambda: self.deliver(engine)),
            (0.74, lambda: self.wait(self.rng.choice([0.05, 0.2, 0.5]))),
            (0.75, lambda: self.wait(6.0)),
            (0.79, self.renew_all),
            (0.81, self.repeat),
            (0.83, lambda: self.drop_token(engine)),
            (0.85, lambda: self.reopen(engine)),
            (0.87, lambda: self.cut(engine)),
            (0.895, lambda: self.mend(engine)),
            (0.905, lambda: self.die(engine)),
            (0.91, lambda: self.fail(engine, self.rng.choice([FAILED, DRAINED]))),
            (0.925, lambda: setattr(engine, "full", not engine.full)),
            (0.93, lambda: setattr(engine, "draining", True)),
            (0.965, lambda: self.move(engine, self.rng.choice(list(self.engines.values())))),
            (0.985, self.answer_replay),
            (1.0, self.cancel),
        ):
            if chance < limit:
                action()
                return

    def heal(self) -> None:
        """Everything works from now on: all requests end, and no engine goes on with any of them."""
        self.healed = True
        self.new_engine()
        for engine in self.engines.values():
            engine.full = False
            self.mend(engine)
            self.reopen(engine)
        for turn in range(600):
            self.wait(0.1)
            while self.replays:
                self.answer_replay()
            for engine in self.engines.values():
                if not engine.alive:
                    continue
                while engine.inbox:
                    self.call(engine)
                self.step(engine)
                self.expire(engine)
                if turn % 10 == 0:
                    self.renew(engine)
                self.take(engine)
                while engine.flight:
                    self.deliver(engine)
            if not self.tracker.requests and not any(e.lives for e in self.engines.values() if e.alive):
                break
        assert not self.tracker.requests, "a request never ended"
        assert set(self.ended) == set(self.emitted)
        assert not any(e.lives for e in self.engines.values() if e.alive), "an engine computes what nobody wants"


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 150))
def test_whatever_the_network_does_every_request_gets_its_tokens_once_and_one_end(seed: int, count: int) -> None:
    Network(seed).run(count)
