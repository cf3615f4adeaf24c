"""Protocols that are wrong in one place are found out: a check that cannot fail checks nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import Engine
from engine.reservations import Reservations
from engine.scheduler import Scheduler
from llumnix.migration import Commit, End, Outcome, Outgoing
from serving import move_destination
from serving.engine_node import EngineNode
from serving.move_payload import Payloads
from serving.move_source import MoveSource
from serving.outbox import Outboxes
from serving.tracker import Tracker
from tests.simulation.run import run

SEEDS = 60  # some need a rare order of events

Patch = pytest.MonkeyPatch


def takes_back(patch: Patch) -> None:
    """A source whose COMMIT was not answered goes on with the request."""
    patch.setattr(Outgoing, "silent", lambda self, reason: End(Outcome.ABORTED, reason))


def goes_on(patch: Patch) -> None:
    """A source goes on with a request that has moved."""
    patch.setattr(Outgoing, "owned", lambda self: End(Outcome.ABORTED, ""))


def decides_again(patch: Patch) -> None:
    """A repeated COMMIT is looked at anew."""

    class Forgetful(OrderedDict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return default

    patch.setattr(move_destination, "OrderedDict", Forgetful)


def submits_again(patch: Patch) -> None:
    """A submission that arrives twice is one more request."""
    opened = Outboxes.opened

    def always(self: Outboxes, *arguments: Any) -> bool:
        opened(self, *arguments)
        return True

    patch.setattr(Outboxes, "opened", always)


def says_nothing(patch: Patch) -> None:
    """A source does not say where the request went."""
    from serving import move_source

    patch.setattr(move_source, "moved_output", lambda *arguments: {"id": "nobody", "epoch": [0, 0], "index": 0})


def keeps_promises(patch: Patch) -> None:
    """A destination's promises never end, and nobody takes them back."""
    patch.setattr(Reservations, "expire", lambda self, now: None)
    patch.setattr(Engine, "cancel_reservation", lambda self, key: None)


def aborts_newer(patch: Patch) -> None:
    """An abort of an older life ends a newer one."""
    patch.setattr(EngineNode, "_abort", lambda self, request_id, epoch: self.engine.abort(request_id))


def never_expires(patch: Patch) -> None:
    """An engine goes on for ingresses that are gone."""
    patch.setattr(Outboxes, "expire", lambda self, now: [])


def sends_too_little(patch: Patch) -> None:
    """The last block stays at the source, and the destination is told that it has it."""
    commit = Outgoing._commit

    def short(self: Outgoing, progress: Any, computed: int) -> Any:
        effect = commit(self, progress, computed)
        if isinstance(effect, Commit) and effect.count > 0:
            return Commit(effect.epoch, effect.computed, effect.first, effect.count - 1, effect.reserved)
        return effect

    patch.setattr(Outgoing, "_commit", short)


def copies_the_wrong_block(patch: Patch) -> None:
    for name in ("of", "of_held"):
        made = getattr(Payloads, name)
        patch.setattr(Payloads, name, lambda self, blocks, *rest, made=made: made(self, blocks[::-1], *rest))


def sends_what_it_has_lost(patch: Patch) -> None:
    """What goes with COMMIT may be read from blocks that are another's by then."""
    patch.setattr(MoveSource, "_holds", lambda self, move: True)


def moves_while_it_runs(patch: Patch) -> None:
    """A request is not held before its COMMIT."""
    hold = Scheduler.hold

    def running(self: Scheduler, request_id: str) -> Any:
        request = hold(self, request_id)
        self.unhold(request_id)
        return request

    patch.setattr(Scheduler, "hold", running)


def ignores_preemption(patch: Patch) -> None:
    """A move goes on with the blocks of before a preemption."""
    patch.setattr(Outgoing, "_check", lambda self, progress: self.gone() if progress is None else None)


def trusts_silence(patch: Patch) -> None:
    """A renewal says nothing of epochs."""
    patch.setattr(Tracker, "epochs", lambda self, engine: {})


def keeps_the_epoch(patch: Patch) -> None:
    """A move does not raise the epoch."""
    commit = Outgoing._commit

    def same(self: Outgoing, progress: Any, computed: int) -> Any:
        effect = commit(self, progress, computed)
        if isinstance(effect, Commit):
            return Commit(progress.epoch, effect.computed, effect.first, effect.count, effect.reserved)
        return effect

    patch.setattr(Outgoing, "_commit", same)


MUTATIONS: list[tuple[Callable[[Patch], None], list[str]]] = [  # with the faults that show it; none: a calm run does
    (takes_back, ["commit_reply_lost"] * 3),
    (goes_on, []),
    (decides_again, ["commit_twice"]),
    (submits_again, ["two_managers"]),
    (says_nothing, ["commit_lost"]),
    (keeps_promises, ["cancelled@copy"]),
    (aborts_newer, ["stream_cut"]),
    (never_expires, ["ingress_killed"]),
    (sends_too_little, []),
    (copies_the_wrong_block, []),
    (moves_while_it_runs, []),
    (ignores_preemption, ["preempted@read"]),
    (sends_what_it_has_lost, ["superseded@read"]),
    (trusts_silence, ["commit_lost", "submission_lost"]),
    (keeps_the_epoch, []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mutate", "points"), MUTATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_protocol_is_found_out(mutate: Callable[[Patch], None], points: list[str], monkeypatch: Patch) -> None:
    assert not any(run(seed, points=points * 4).violations for seed in range(2))
    mutate(monkeypatch)
    for seed in range(SEEDS):
        outcome = run(seed, points=points * 4)
        if outcome.violations:
            print(f"{mutate.__name__}: seed {seed}: {outcome.violations[0]}")
            return
    pytest.fail(f"{SEEDS} seeds noticed nothing")
