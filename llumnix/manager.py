"""The manager's cluster view: a pure state machine. Soft state: reports alone rebuild it after a restart."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from llumnix.load import PROTOCOL_VERSION, LoadReport, freeness
from llumnix.settings import DEFAULTS, LlumnixSettings

SUSPECT_S = 3.0  # silence after which an engine is shown as suspect
GONE_S = 10.0  # silence after which it leaves the view


@dataclass
class Member:
    report: LoadReport
    actor: Any  # how to reach it; opaque here
    heard: float


@dataclass
class ClusterView:
    """Engines by id. `version` rises with every change an ingress should see."""

    started: float = 0.0
    members: dict[str, Member] = field(default_factory=dict)
    version: int = 0
    stale_reports: int = 0

    def on_report(self, message: dict[str, Any], now: float) -> dict[str, Any]:
        """Take a load report; the answer says whether the engine must introduce itself with its actor."""
        report = LoadReport.from_message(message)
        member = self.members.get(report.engine)
        if member is not None:
            known = member.report
            if (report.incarnation, report.sequence) <= (known.incarnation, known.sequence):
                self.stale_reports += 1
                return _answer(known=True)
        actor = message.get("actor")
        if actor is None and member is not None and member.report.incarnation == report.incarnation:
            actor = member.actor
        if actor is None:
            return _answer(known=False)
        self.members[report.engine] = Member(report, actor, now)
        self.version += 1
        return _answer(known=True)

    def on_gone(self, engine: str) -> None:
        """An engine said goodbye, or its replica says that it died."""
        if self.members.pop(engine, None) is not None:
            self.version += 1

    def tick(self, now: float) -> None:
        """Drop engines that have been silent for long."""
        for name in [name for name, member in self.members.items() if now - member.heard > GONE_S]:
            self.on_gone(name)

    def view(self, now: float, known: Collection[str] = ()) -> dict[str, Any]:
        """What ingresses follow: {"v", "version", "engines": {id: {"actor", "report", "silent_s"}}}.

        Actors are large to send: they are None for the engines that the ingress knows already. What could move is
        nothing to ingresses.
        """
        engines = {
            name: {
                "actor": None if name in known else member.actor,
                "report": {**member.report.to_message(), "movable": ()},
                "silent_s": now - member.heard,
            }
            for name, member in self.members.items()
        }
        return {"v": PROTOCOL_VERSION, "version": self.version, "engines": engines}

    def reports(self, now: float) -> list[LoadReport]:
        """Of the engines that have been heard of lately: the others may be gone."""
        return [member.report for member in self.members.values() if now - member.heard <= SUSPECT_S]

    def snapshot(self, now: float, settings: LlumnixSettings = DEFAULTS) -> dict[str, Any]:
        """For people and metrics: every engine with its state and freeness."""
        replicas = []
        for name, member in sorted(self.members.items()):
            report = member.report
            state = "suspect" if now - member.heard > SUSPECT_S else report.state
            replicas.append(
                {
                    "id": name,
                    "role": report.role,
                    "state": state,
                    "phase": report.phase,
                    "blocks": {
                        "total": report.total_blocks,
                        "free": report.free_blocks,
                        "cached": report.cached_blocks,
                    },
                    "freeness": freeness(report, settings),
                    "running": report.running,
                    "waiting": report.waiting,
                }
            )
        manager = {"version": self.version, "uptime_s": now - self.started, "stale_reports": self.stale_reports}
        return {"replicas": replicas, "manager": manager}


def _answer(known: bool) -> dict[str, Any]:
    return {"v": PROTOCOL_VERSION, "known": known}
