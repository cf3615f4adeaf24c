"""The manager's view of the cluster, rebuilt from reports alone."""

from __future__ import annotations

import json
from typing import Any

from llumnix.load import DRAINING, READY, LoadReport
from llumnix.manager import GONE_S, SUSPECT_S, ClusterView


def message(engine: str = "e", incarnation: float = 1.0, sequence: int = 1, **rest: Any) -> dict[str, Any]:
    actor = rest.pop("actor", "handle")
    found = LoadReport(engine, incarnation, sequence, state=rest.pop("state", READY), **rest).to_message()
    return {**found, "actor": actor} if actor is not None else found


def shown(view: ClusterView, engine: str = "e") -> dict[str, Any]:
    return view.view(0.0)["engines"][engine]


def test_an_engine_must_introduce_itself_once() -> None:
    view = ClusterView()
    assert not view.on_report(message(actor=None), 0.0)["known"]
    assert view.view(0.0)["engines"] == {}
    assert view.on_report(message(sequence=2), 0.0)["known"]
    assert view.on_report(message(sequence=3, actor=None, running=4), 0.0)["known"]
    assert shown(view)["actor"] == "handle" and shown(view)["report"]["running"] == 4


def test_actors_are_sent_only_to_whom_does_not_know_them() -> None:
    view = ClusterView()
    for name in "ab":
        view.on_report(message(name), 0.0)
    engines = view.view(0.0, known=["a", "gone"])["engines"]
    assert {name: entry["actor"] for name, entry in engines.items()} == {"a": None, "b": "handle"}
    assert {entry["report"]["state"] for entry in engines.values()} == {READY}


def test_the_newest_report_wins_whatever_the_order() -> None:
    view = ClusterView()
    for sequence in (2, 1, 5, 3, 5):
        view.on_report(message(sequence=sequence, running=sequence), 0.0)
    assert shown(view)["report"]["running"] == 5
    assert view.snapshot(0.0)["manager"]["stale_reports"] == 3


def test_a_suspect_that_answers_is_taken_back_at_once_and_one_that_does_not_is_dropped() -> None:
    view = ClusterView()
    for name in "ab":
        view.on_report(message(name), 0.0)
    late = SUSPECT_S + 0.1
    assert view.suspects(SUSPECT_S) == [] and view.suspects(late) == ["a", "b"] and view.reports(late) == []
    view.on_answer("a", 1.0, late)
    view.on_answer("b", 0.5, late)  # an earlier process of that name
    view.on_answer("c", 1.0, late)
    assert view.suspects(late) == ["b"] and [report.engine for report in view.reports(late)] == ["a"]
    assert {r["id"]: r["state"] for r in view.snapshot(late)["replicas"]} == {"a": READY, "b": "suspect"}
    assert view.view(late)["engines"]["a"]["silent_s"] == late, "its report is no newer"
    view.tick(GONE_S + 0.1)
    assert list(view.members) == ["a"] and view.suspects(GONE_S + 0.1) == ["a"]
    view.tick(late + GONE_S + 0.1)
    assert not view.members


def test_a_new_incarnation_beats_any_sequence_of_the_old_one() -> None:
    view = ClusterView()
    view.on_report(message(incarnation=1.0, sequence=900, running=9), 0.0)
    view.on_report(message(incarnation=2.0, sequence=1, running=1, actor="new"), 0.0)
    view.on_report(message(incarnation=1.0, sequence=901, running=9), 0.0)
    assert shown(view)["report"]["running"] == 1 and shown(view)["actor"] == "new"


def test_a_new_incarnation_does_not_inherit_the_dead_ones_actor() -> None:
    view = ClusterView()
    view.on_report(message(incarnation=1.0), 0.0)
    assert not view.on_report(message(incarnation=2.0, actor=None), 0.0)["known"]
    assert shown(view)["report"]["incarnation"] == 1.0


def test_a_stale_report_is_no_sign_of_life() -> None:
    view = ClusterView()
    view.on_report(message(sequence=5), 0.0)
    view.on_report(message(sequence=4), 9.0)
    view.tick(GONE_S + 0.1)
    assert view.view(0.0)["engines"] == {}


def test_every_change_raises_the_version_and_nothing_else_does() -> None:
    view = ClusterView()
    versions = [view.version]
    for change in (
        lambda: view.on_report(message(sequence=1), 0.0),
        lambda: view.on_report(message(sequence=2), 0.0),
        lambda: view.on_gone("e"),
    ):
        change()
        versions.append(view.version)
    assert len(set(versions)) == 4
    for nothing in (
        lambda: view.on_gone("e"),
        lambda: view.tick(100.0),
        lambda: view.on_report(message(engine="x", actor=None), 0.0),
    ):
        nothing()
        assert view.version == versions[-1]


def test_silent_engines_become_suspect_and_then_leave() -> None:
    view = ClusterView()
    view.on_report(message("a"), 0.0)
    view.on_report(message("b", state=DRAINING), 5.0)
    assert [r["state"] for r in view.snapshot(SUSPECT_S)["replicas"]] == [READY, DRAINING]
    assert [r["state"] for r in view.snapshot(SUSPECT_S + 0.1)["replicas"]] == ["suspect", DRAINING]
    view.tick(GONE_S)
    assert set(view.members) == {"a", "b"}
    view.tick(GONE_S + 0.1)
    assert set(view.members) == {"b"}


def test_an_engine_that_left_comes_back_with_its_next_report() -> None:
    view = ClusterView()
    view.on_report(message(sequence=7), 0.0)
    view.on_gone("e")
    assert not view.on_report(message(sequence=8, actor=None), 1.0)["known"]
    assert view.on_report(message(sequence=9), 1.0)["known"]


def test_a_restarted_manager_fills_from_reports_of_any_sequence() -> None:
    view = ClusterView()
    view.on_report(message("a", sequence=1234), 0.0)
    view.on_report(message("b", sequence=1, incarnation=0.5), 0.0)
    assert set(view.view(0.0)["engines"]) == {"a", "b"}


def test_unknown_keys_of_newer_engines_are_ignored() -> None:
    view = ClusterView()
    view.on_report({**message(), "colour": "blue", "v": 2}, 0.0)
    assert "colour" not in shown(view)["report"]


def test_view_and_snapshot_tell_silence_and_load() -> None:
    view = ClusterView(started=100.0)
    view.on_report(
        message(total_blocks=100, free_blocks=60, cached_blocks=10, running=4, waiting=1, head_blocks=20), 103.0
    )
    assert view.view(105.0)["engines"]["e"]["silent_s"] == 2.0
    snapshot = view.snapshot(105.0)
    assert snapshot["manager"] == {"version": 1, "uptime_s": 5.0, "stale_reports": 0}
    replica = snapshot["replicas"][0]
    assert replica["blocks"] == {"total": 100, "free": 60, "cached": 10}
    assert replica["freeness"] == (60 - 20) * 16 / 4
    assert (replica["running"], replica["waiting"], replica["id"]) == (4, 1, "e")
    json.dumps(snapshot, allow_nan=False)


def test_a_view_holds_what_has_changed_since_the_last_one() -> None:
    view = ClusterView("m")
    for name in "ab":
        view.on_report(message(name, actor=name), 0.0)
    first = view.view(0.0)
    assert set(first["engines"]) == set(first["names"]) == {"a", "b"}
    assert view.is_current(first["version"])
    view.on_report(message("b", sequence=2, actor=None), 1.0)
    second = view.view(1.0, first["version"], known=["a", "b"])
    assert set(second["engines"]) == {"b"} and second["names"] is None
    assert set(view.view(1.0, second["version"], known=["a"])["engines"]) == {"b"}, "it is told until it is known"
    view.on_gone("a")
    third = view.view(1.0, second["version"], known=["a", "b"])
    assert third["engines"] == {} and third["names"] == ["b"]


def test_a_view_of_another_manager_is_no_beginning() -> None:
    old, new = ClusterView("old"), ClusterView("new")
    for _ in range(3):
        old.on_gone("x")
    for view in (old, new):
        view.on_report(message("a", actor="a"), 0.0)
    assert not new.is_current(old.view(0.0)["version"])
    assert set(new.view(0.0, old.view(0.0)["version"], known=["a"])["engines"]) == {"a"}


def test_the_more_engines_the_farther_apart_their_reports() -> None:
    view = ClusterView("m")
    assert view.on_report(message("e", actor="e"), 0.0)["interval_s"] == 0.1
    for i in range(1024):
        answer = view.on_report(message(f"e{i}", actor="x"), 0.0)
    assert 2.0 < answer["interval_s"] < 3.0
    view.tick(GONE_S + 1.0)
    assert len(view.members) == 1025, "they had no turn yet"
    view.tick(GONE_S + 3.0)
    assert not view.members
