"""Every transition of the manager's side of moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llumnix.load import DRAINING, LoadReport
from llumnix.policies.choice import BALANCE, DRAIN, OPERATOR
from llumnix.rescheduler import BATCH, COMMAND_TIMEOUT_S, KEPT_MOVES, Command, Rescheduler
from llumnix.settings import DEFAULTS
from tests.llumnix.reports import movable, report


def loaded(engine: str = "full", **rest: Any) -> LoadReport:
    """An engine that should give requests away."""
    return report(engine, free_blocks=2, running=20, movable=(movable(blocks=4),), **rest)


def result(source: str = "full", outcome: str = "moved", cause: str = BALANCE, **rest: Any) -> dict[str, Any]:
    return {
        "request_id": "r",
        "source": source,
        "destination": "empty",
        "outcome": outcome,
        "cause": cause,
        "epoch": [0, 1],
        "blocks_sent": 3,
        "blocks_skipped": 2,
        "bytes": 100,
        "stages": 1,
        **rest,
    }


def test_a_round_makes_commands_with_numbers_of_their_own() -> None:
    rescheduler = Rescheduler()
    reports = [loaded("a"), loaded("b"), report("c"), report("d")]
    commands = rescheduler.round(reports, 5.0)
    assert [(c.source, c.cause, c.count, c.issued) for c in commands] == [
        ("a", BALANCE, 1, 5.0),
        ("b", BALANCE, 1, 5.0),
    ]
    assert {c.destination for c in commands} == {"c", "d"}
    assert len({c.number for c in commands}) == 2
    assert rescheduler.open == {c.number: c for c in commands}
    assert rescheduler.rounds == 1


def test_engines_of_open_commands_are_busy_until_those_are_done() -> None:
    rescheduler = Rescheduler()
    reports = [loaded(), report("empty")]
    (command,) = rescheduler.round(reports, 0.0)
    assert rescheduler.round(reports, 0.2) == []
    rescheduler.done(command, [], 0.0)
    assert rescheduler.open == {}
    (again,) = rescheduler.round(reports, 0.4)
    assert again.number != command.number


def test_a_command_nobody_answers_is_forgotten() -> None:
    rescheduler = Rescheduler()
    reports = [loaded(), report("empty")]
    (command,) = rescheduler.round(reports, 0.0)
    assert rescheduler.round(reports, COMMAND_TIMEOUT_S) == []
    (again,) = rescheduler.round(reports, COMMAND_TIMEOUT_S + 0.1)
    rescheduler.done(command, [], 0.0)  # the late answer of the first does not end the second
    assert rescheduler.open == {again.number: again}


def test_a_draining_engine_gives_many_at_a_time() -> None:
    rescheduler = Rescheduler()
    drains = report("old", state=DRAINING, running=3, movable=(movable(blocks=4),))
    (command,) = rescheduler.round([drains, report("new")], 0.0)
    assert (command.source, command.destination, command.cause, command.count) == ("old", "new", DRAIN, BATCH)


def test_somebody_may_command_beside_the_rounds() -> None:
    rescheduler = Rescheduler()
    command = rescheduler.command("full", "empty", OPERATOR, 1, 1 << 30, 1.0)
    assert command == Command(1, "full", "empty", OPERATOR, 1, 1 << 30, 1.0)
    assert rescheduler.round([loaded(), report("empty")], 1.0) == []


def test_results_are_counted_and_kept_for_people() -> None:
    rescheduler = Rescheduler()
    command = rescheduler.command("full", "empty", BALANCE, 2, 10, 0.0)
    kept = rescheduler.done(command, [result(), result(outcome="aborted", request_id="s")], 77.0)
    assert [(move["request_id"], move["at"], move["downtime_ms"]) for move in kept] == [
        ("r", 77.0, None),
        ("s", 77.0, None),
    ]
    assert list(rescheduler.moves) == kept
    assert rescheduler.counts == {(BALANCE, "moved"): 1, (BALANCE, "aborted"): 1}
    assert rescheduler.totals == {"blocks_sent": 6, "blocks_skipped": 4, "bytes": 200, "stages": 2}
    for number in range(KEPT_MOVES):
        rescheduler.done(command, [result(request_id=f"m{number}")], 78.0)
    assert len(rescheduler.moves) == KEPT_MOVES
    assert rescheduler.moves[0]["request_id"] == "m0"


def test_a_downtime_finds_the_move_it_is_of() -> None:
    rescheduler = Rescheduler()
    command = rescheduler.command("full", "empty", BALANCE, 1, 10, 0.0)
    rescheduler.done(command, [result(), result(epoch=[0, 2], cause=DRAIN)], 0.0)
    assert rescheduler.downtime("r", (0, 1), 0.02) == BALANCE
    assert rescheduler.downtime("r", [0, 2], 0.03) == DRAIN
    assert rescheduler.downtime("r", [1, 2], 0.03) is None
    assert rescheduler.downtime("other", [0, 1], 0.03) is None
    assert [move["downtime_ms"] for move in rescheduler.moves] == [20.0, 30.0]


def test_the_receipt_of_a_drain_is_given_once() -> None:
    rescheduler = Rescheduler()
    command = rescheduler.command("old", "new", DRAIN, 2, 10, 0.0)
    results = [
        result("old", cause=DRAIN),
        result("old", cause=DRAIN, epoch=[0, 2]),
        result("old", "aborted", DRAIN, epoch=None),
    ]
    rescheduler.done(command, results, 0.0)
    rescheduler.downtime("r", [0, 1], 0.02)
    rescheduler.downtime("r", [0, 2], 0.01)
    assert rescheduler.receipt("old") == {"moves_failed": 1, "gaps_seen": 2, "worst_gap_ms": 20.0}
    assert rescheduler.receipt("old") == {"moves_failed": 0, "gaps_seen": 0, "worst_gap_ms": None}


def test_with_moves_switched_off_only_draining_engines_give() -> None:
    rescheduler = Rescheduler(replace(DEFAULTS, enable_moves=False))
    drains = report("old", state=DRAINING, running=3, movable=(movable(blocks=4),))
    commands = rescheduler.round([loaded(), drains, report("empty"), report("other")], 0.0)
    assert [(c.source, c.cause) for c in commands] == [("old", DRAIN)]
