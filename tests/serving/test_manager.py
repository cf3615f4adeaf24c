"""The manager as ingresses meet it: one view a moment, however many engines report."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from llumnix.load import DECODE, MIXED, PREFILL, READY, LoadReport
from llumnix.manager import GONE_S, SUSPECT_S
from llumnix.policies.choice import BALANCE, DRAIN
from llumnix.rescheduler import COMMAND_TIMEOUT_S
from llumnix.settings import DEFAULTS, LlumnixSettings
from serving import manager
from serving.cluster_api import move_error
from serving.manager import Manager

PLAIN: Any = Manager.func_or_class  # type: ignore[attr-defined]


def report(engine: str, sequence: int) -> dict[str, Any]:
    return {**LoadReport(engine, 1.0, sequence, state=READY).to_message(), "actor": f"handle of {engine}"}


async def test_busy_engines_do_not_make_an_ingress_poll_without_pause() -> None:
    served = PLAIN()
    sequence = 0

    async def busy() -> None:
        nonlocal sequence
        while True:
            sequence += 1
            await served.report(report(f"e{sequence % 8}", sequence))
            await asyncio.sleep(0.001)

    task = asyncio.create_task(busy())
    version, answers, started = -1, 0, time.monotonic()
    while time.monotonic() - started < 0.5:
        version = (await served.view(version, []))["version"]
        answers += 1
    task.cancel()
    assert 3 <= answers <= 0.5 / manager.GATHER_S + 1
    assert sequence > 3 * answers and version[1] > sequence - 100


async def test_a_change_is_told_soon_and_nothing_after_a_while() -> None:
    served = PLAIN()
    await served.report(report("a", 1))
    view = await served.view(-1, [])
    assert view["engines"]["a"]["actor"] == "handle of a"
    waiting = asyncio.create_task(served.view(view["version"], ["a"]))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await served.report(report("b", 1))
    changed = await asyncio.wait_for(waiting, 4 * manager.GATHER_S)
    assert {name: entry["actor"] for name, entry in changed["engines"].items()} == {"b": "handle of b"}
    assert changed["names"] == ["a", "b"]
    started = time.monotonic()
    assert (await served.view(changed["version"], ["a", "b"]))["version"] == changed["version"]
    assert 0.5 < time.monotonic() - started < manager.POLL_S + 0.5


@pytest.mark.parametrize(
    ("answer", "states"),
    [
        (None, {"a": READY}),
        (ActorDiedError(), {}),
        (RuntimeError("the engine failed"), {"a": "suspect"}),
        (9, {"a": "suspect"}),
    ],
)
async def test_a_suspect_is_asked_whether_it_lives(
    answer: Any, states: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(manager.clock, "now", lambda: now)
    monkeypatch.setattr(manager, "PROBE_S", 0.02)
    served, engine = PLAIN(), Engine()

    async def ping() -> None:
        if isinstance(answer, Exception):
            raise answer
        await asyncio.sleep(answer or 0)

    engine.ping = Method(ping)  # type: ignore[attr-defined]
    load = LoadReport("a", 1.0, 1, state=READY)
    await served.report({**load.to_message(), "actor": engine})
    now += SUSPECT_S + 0.1
    await asyncio.sleep(0.1)
    assert {replica["id"]: replica["state"] for replica in (await served.snapshot())["replicas"]} == states
    now += GONE_S - SUSPECT_S
    await asyncio.sleep(0.1)
    await served.view(None, [])
    assert list(served.cluster.members) == (["a"] if answer is None else [])


# Settings


def test_moves_are_off_until_the_first_settings_come() -> None:
    served = PLAIN()
    assert not served.rescheduler.settings.enable_moves
    served.reconfigure({"llumnix": {"max_moves": 3}, "kv_transfer": {"compression": "zlib"}})
    assert served.rescheduler.settings == replace(DEFAULTS, max_moves=3)
    assert served.transfer.compression == "zlib"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"llumnix": {"max_move": 3}}, "no setting 'max_move'"),
        ({"llumnix": {"max_moves": 10**400}}, "max_moves is 1000"),
        ({"llumnix": {"pd_ratio": "1" * 5000 + ":1"}}, "pd_ratio is '1111"),
        ({"llumnix": {"pd_ratio": "1:1", "enable_moves": False}}, "must be none while requests do not move"),
        ({"llumnix": []}, "must be a mapping"),
        ({"kv_transfer": 0}, "must be a mapping"),
        ([], "must be a mapping"),
    ],
)
def test_a_manager_that_starts_with_wrong_settings_starts(given: Any, reason: str) -> None:
    """It may be a restart, and without a manager nobody hears of a new engine."""
    served = PLAIN()
    served.reconfigure(given)
    assert served.rescheduler.settings == DEFAULTS and reason in served.settings_error
    assert "\n" not in served.settings_error and len(served.settings_error) < 400
    served.reconfigure({"llumnix": None, "kv_transfer": {}})
    assert served.configured and not served.settings_error


def test_wrong_settings_leave_those_in_force() -> None:
    served = PLAIN()
    served.reconfigure({"llumnix": {"max_moves": 3}})
    before = served.settings_version
    served.reconfigure({"llumnix": {"max_moves": 5}, "kv_transfer": {"batch": 2}})
    assert served.rescheduler.settings.max_moves == 3 and served.settings_version == before
    assert "no setting 'batch'" in served.settings_error
    served.reconfigure({"llumnix": {"max_moves": 5}})
    assert served.rescheduler.settings.max_moves == 5 and not served.settings_error


def test_a_version_means_the_same_settings_in_every_manager() -> None:
    first, second = PLAIN(), PLAIN()
    assert first.settings_version == second.settings_version
    first.reconfigure({"llumnix": {"max_moves": 3}})
    second.reconfigure({"llumnix": {"max_moves": 4}})
    assert len({first.settings_version, second.settings_version, PLAIN().settings_version}) == 3
    second.reconfigure({"llumnix": {"max_moves": 3}})
    assert first.settings_version == second.settings_version


async def test_settings_go_to_those_who_have_others() -> None:
    served = PLAIN()
    served.reconfigure({"llumnix": {"dispatch_policy": "lmetric"}})
    answer = await served.report({**report("a", 1), "settings": -1})
    assert LlumnixSettings.of_message(answer["settings"]).dispatch_policy == "lmetric"
    version = answer["settings_version"]
    assert "settings" not in await served.report({**report("a", 2), "settings": version})
    view = await served.view(-1, [])
    assert view["settings"] == answer["settings"] and view["settings_version"] == version
    assert "settings" not in await served.view(-1, [], version)


# Roles


def in_role(engine: str, sequence: int, role: str, running: int = 0) -> dict[str, Any]:
    load = LoadReport(engine, 1.0, sequence, state=READY, role=role, running=running)
    return {**load.to_message(), "actor": f"handle of {engine}"}


async def test_a_new_manager_leaves_the_roles_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name alone, or before all have reported, a would become the one that prefills."""
    now = 100.0
    monkeypatch.setattr(manager.clock, "now", lambda: now)
    served = PLAIN()
    served.reconfigure({"llumnix": {"pd_ratio": "1:1"}})
    assert "role" not in await served.report(in_role("a", 1, DECODE, running=9))
    served._assign_roles()
    assert "role" not in await served.report(in_role("a", 2, DECODE, running=9))
    await served.report(in_role("b", 1, PREFILL))
    now += manager.SETTLE_S
    served._assign_roles()
    assert (await served.report(in_role("a", 3, DECODE, running=9)))["role"] == DECODE
    assert (await served.report(in_role("b", 2, PREFILL)))["role"] == PREFILL


async def test_a_role_that_was_given_stays_though_the_engine_has_not_heard_of_it() -> None:
    served = PLAIN()
    served.reconfigure({"llumnix": {"pd_ratio": "1:1"}})
    for sequence, (first, second) in enumerate([(1, 0), (0, 1), (1, 0)], 1):
        await served.report(in_role("a", sequence, MIXED, first))
        await served.report(in_role("b", sequence, MIXED, second))
        served.settled_at = 0.0
        served._assign_roles()
        assert served.roles == {"a": DECODE, "b": PREFILL}


async def test_roles_end_with_moves_and_one_without_the_other_is_refused() -> None:
    served = PLAIN()
    served.reconfigure({"llumnix": {"pd_ratio": "1:1"}})
    for sequence in (1, 2):
        for name in "ab":
            await served.report(in_role(name, sequence, MIXED))
            served.settled_at = 0.0
        served._assign_roles()
    assert sorted(served.roles.values()) == [DECODE, PREFILL]
    served.reconfigure({"llumnix": {"pd_ratio": "1:1", "enable_moves": False}})
    assert "pd_ratio is '1:1'" in served.settings_error and served.rescheduler.settings.enable_moves
    served.reconfigure({"llumnix": {"enable_moves": False}})
    served._assign_roles()
    assert not served.settings_error and served.roles == {"a": MIXED, "b": MIXED}
    assert (await served.report(in_role("b", 3, PREFILL)))["role"] == MIXED


# What operators see


class Engine:
    """Looks like an engine's actor: it has requests, and gives the one it is asked for."""

    def __init__(self, *requests: str, outcome: str = "moved"):
        self.requests, self.outcome = requests, outcome
        self.commands: list[dict[str, Any]] = []
        self.gone = False

    @property
    def snapshot(self) -> Any:
        return Method(self._snapshot)

    @property
    def migrate(self) -> Any:
        return Method(self._migrate)

    async def _snapshot(self) -> dict[str, Any]:
        if self.gone:
            raise ConnectionError
        made = {"status": "running", "priority": 0, "tokens": 5, "blocks": 2, "client": "i", "epoch": [0, 0]}
        return {"requests": [{"id": name, **made} for name in self.requests]}

    async def _migrate(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        self.commands.append(command)
        if self.outcome == "none":
            return []
        moved = self.outcome == "moved"
        return [
            {
                "request_id": command["request_id"],
                "source": "a",
                "destination": command["destination"],
                "cause": command["cause"],
                "outcome": self.outcome,
                "reason": "" if moved else "no room",
                "mechanism": "live",
                "blocks_sent": 3,
                "blocks_skipped": 1,
                "bytes": 300,
                "stages": 1,
                "duration_ms": 5.0,
                "held_ms": 1.0,
                "epoch": [0, 1] if moved else None,
            }
        ]


class Method:
    def __init__(self, call: Any):
        self.remote = call


async def cluster(*requests: str, outcome: str = "moved") -> tuple[Any, Engine]:
    served, source = PLAIN(), Engine(*requests, outcome=outcome)
    for name, engine in (("a", source), ("b", Engine())):
        load = LoadReport(name, 1.0, 1, state=READY, total_blocks=100, free_blocks=90, cached_blocks=5, running=1)
        await served.report({**load.to_message(), "actor": engine})
    return served, source


MOVE_KEYS = {
    *("request_id", "source", "destination", "cause", "outcome", "blocks_sent", "blocks_skipped", "duration_ms"),
    *("downtime_ms", "at"),
}


async def test_the_snapshot_has_the_documented_shape() -> None:
    served, source = await cluster("cmpl-1-0")
    before = time.time()
    await served.migrate("cmpl-1", "b", {})
    seen = await served.snapshot()
    assert set(seen) == {"replicas", "moves", "manager"}
    first = seen["replicas"][0]
    assert {"id", "role", "state", "blocks", "freeness", "requests"} <= set(first)
    assert first["blocks"] == {"total": 100, "free": 90, "cached": 5}
    assert first["requests"] == [{"id": "cmpl-1-0", "status": "running", "priority": 0, "tokens": 5}]
    (move,) = seen["moves"]
    assert set(move) >= MOVE_KEYS and "epoch" not in move
    assert before <= move["at"] <= time.time() and move["downtime_ms"] is None
    source.gone = True
    assert (await served.snapshot())["replicas"][0]["requests"] == []


async def test_an_operators_move_names_a_sequence_or_the_response_of_one() -> None:
    served, source = await cluster("cmpl-1-0")
    served.reconfigure({"kv_transfer": {"batch_size": 4}})
    for name in ("cmpl-1", "cmpl-1-0"):
        move = await served.migrate(name, "b", {"mechanism": "recompute"})
        assert (move["request_id"], move["outcome"], move["cause"]) == ("cmpl-1-0", "moved", "operator")
        assert set(move) >= MOVE_KEYS
    assert source.commands[0]["mechanism"] == "recompute" and source.commands[0]["batch_size"] == 4
    assert source.commands[0]["request_id"] == "cmpl-1-0" and not served.rescheduler.open


@pytest.mark.parametrize(
    ("outcome", "request_id", "destination", "kind", "message"),
    [
        ("moved", "cmpl-1", "c", "not_found", "no replica 'c'"),
        ("moved", "cmpl-2", "b", "not_found", "no replica has a request 'cmpl-2'"),
        ("moved", "cmpl-1", "a", "conflict", "request cmpl-1-0 is on a already"),
        ("none", "cmpl-1", "b", "conflict", "cannot move now"),
        ("aborted", "cmpl-1", "b", "conflict", "did not move: no room"),
        ("refused", "cmpl-1", "b", "conflict", "did not move: no room"),
        ("unconfirmed", "cmpl-1", "b", "conflict", "whether request cmpl-1-0 moved is not known: no room"),
    ],
)
async def test_what_an_operator_cannot_have(
    outcome: str, request_id: str, destination: str, kind: str, message: str
) -> None:
    served, _ = await cluster("cmpl-1-0", outcome=outcome)
    answer = await served.migrate(request_id, destination, {})
    assert answer["error"] == kind and message in answer["message"]
    assert not served.rescheduler.open


async def test_the_public_name_of_a_response_with_several_sequences_names_none() -> None:
    served, source = await cluster("cmpl-1-0", "cmpl-1-1", "cmpl-10-0")
    assert (await served.migrate("cmpl-1", "b", {}))["error"] == "not_found"
    assert (await served.migrate("cmpl-1-1", "b", {}))["outcome"] == "moved"
    assert (await served.migrate("cmpl-10", "b", {}))["outcome"] == "moved"


async def test_an_operator_hears_of_a_wrong_mechanism_and_of_a_source_that_fails() -> None:
    served, source = await cluster("cmpl-1-0")
    for options, message in (
        ({"mechanism": "walk"}, "mechanism is 'walk', must be one of live, stop_and_copy, recompute, requeue"),
        ({"mechanism": None}, "mechanism is None, must be one of"),
        ({"cause": None}, "no setting 'cause'"),
        ({"compression": "lz4"}, "compression is 'lz4', must be one of"),
        ({"batch_size": -1}, "batch_size is -1"),
    ):
        answer = await served.migrate("cmpl-1", "b", options)
        assert answer["error"] == "bad_request" and message in answer["message"]
        assert move_error(answer).status == 400 and not source.commands

    async def fail(command: dict[str, Any]) -> Any:
        raise ConnectionError

    source._migrate = fail  # type: ignore[method-assign]
    answer = await served.migrate("cmpl-1", "b", {})
    assert answer["error"] == "conflict" and "replica a did not carry the move out" in answer["message"]


async def test_a_drain_that_nobody_takes_from_is_no_hurry() -> None:
    for outcome in ("moved", "aborted"):
        served, _ = await cluster("r", outcome=outcome)
        command = served.rescheduler.command("a", "b", DRAIN, 1, 100, 0.0)
        await served._carry_out(command, {"request_id": "r"})
        assert served.urgent.is_set() == (outcome == "moved")


async def test_many_downtimes_cost_the_manager_little_and_keep_their_causes() -> None:
    """400 moves a second, whose ingress tells a second later: many more than the history shows."""
    served, _ = await cluster("r")
    command = served.rescheduler.command("a", "b", BALANCE, 1, 100, 0.0)
    (made,) = await served.cluster.members["a"].actor._migrate(
        {"request_id": "r", "destination": "b", "cause": BALANCE}
    )
    started = time.process_time()
    for second in range(20):
        for number in range(400):
            moves = served.rescheduler.done(command, [{**made, "request_id": f"{second}-{number}"}], float(second))
            served._match_downtimes(moves)
        await served.downtime([(f"{second}-{number}", (0, 1), 0.04) for number in range(400)])
    assert counted(served, BALANCE) == 8000 and not served.early
    assert time.process_time() - started < 2.0  # 20 s of such a cluster; a tenth of it here


async def test_a_manager_that_has_just_started_knows_it() -> None:
    assert not await PLAIN().knows_engines()
    served, _ = await cluster()
    assert await served.knows_engines()


# Downtimes


def counted(served: Any, cause: str) -> float:
    for line in served.downtimes.registry.collect():
        for sample in line.samples:
            if sample.name.endswith("_count") and sample.labels["cause"] == cause:
                return sample.value
    return 0.0


@pytest.mark.parametrize("early", [False, True])
async def test_a_downtime_finds_its_move_whichever_comes_first(early: bool) -> None:
    served, _ = await cluster("cmpl-1-0")
    seen = [("cmpl-1-0", (0, 1), 0.25)]
    if early:
        await served.downtime(seen)
    await served.migrate("cmpl-1", "b", {})
    if not early:
        await served.downtime(seen)
    assert (await served.snapshot())["moves"][0]["downtime_ms"] == 250.0
    assert counted(served, "operator") == 1 and not served.early


async def test_a_downtime_of_a_move_nobody_tells_of_is_counted_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    served = PLAIN()
    now = 100.0
    monkeypatch.setattr(manager.clock, "now", lambda: now)
    await served.downtime([("r", (0, 1), 0.25)])
    assert counted(served, "unknown") == 0 and len(served.early) == 1
    now += COMMAND_TIMEOUT_S + 1
    await served.downtime([])
    assert counted(served, "unknown") == 1 and not served.early


async def test_moves_and_freeness_are_in_the_metrics() -> None:
    served, _ = await cluster("cmpl-1-0")
    await served.migrate("cmpl-1", "b", {})
    await served.downtime([("cmpl-1-0", (0, 1), 0.25)])
    text = (await served.metrics_text()).decode()
    for line in (
        'ferry_moves_total{cause="operator",outcome="moved"} 1.0',
        "ferry_move_stages_total 1.0",
        "ferry_move_blocks_sent_total 3.0",
        "ferry_move_blocks_skipped_total 1.0",
        "ferry_move_bytes_total 300.0",
        'ferry_move_downtime_seconds_sum{cause="operator"} 0.25',
        'ferry_freeness_steps{replica="a"} 1440.0',
    ):
        assert line in text.splitlines()
