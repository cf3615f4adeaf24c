"""The manager's cluster view: a pure state machine. Soft state: reports alone rebuild it after a restart."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from llumnix.load import LONG_AGO, PROTOCOL_VERSION, LoadReport, freeness
from llumnix.settings import DEFAULTS, LlumnixSettings

SUSPECT_S = 3.0  # silence, beyond the time between two reports, after which an engine is suspect, and is asked
GONE_S = 10.0  # silence, beyond that time, and without an answer, after which it leaves the view
MIN_INTERVAL_S = 0.1  # between two reports of an engine
REPORT_S = 0.0026  # each engine's share of that time: reports cost 0.9 ms of CPU, and must cost less than half a core


@dataclass
class Member:
    report: LoadReport
    actor: Any  # how to reach it; opaque here
    heard: float  # when its newest report came
    changed: int = 0  # the version that came with its report
    answered: float = LONG_AGO  # when it last answered to the question whether it lives

    def silent_s(self, now: float) -> float:
        """How long there has been no sign of life."""
        return now - max(self.heard, self.answered)


@dataclass
class ClusterView:
    """Engines by id. `version` rises with every change an ingress should see; `id` tells its versions from those of
    another manager."""

    id: str = ""
    started: float = 0.0
    members: dict[str, Member] = field(default_factory=dict)
    version: int = 0
    names_version: int = 0  # when an engine last came or went
    stale_reports: int = 0

    def on_report(self, message: dict[str, Any], now: float) -> dict[str, Any]:
        """Take a load report; the answer says whether the engine must introduce itself with its actor."""
        report = LoadReport.from_message(message)
        member = self.members.get(report.engine)
        if member is not None:
            known = member.report
            if (report.incarnation, report.sequence) <= (known.incarnation, known.sequence):
                self.stale_reports += 1
                return self._answer(known=True)
        actor = message.get("actor")
        if actor is None and member is not None and member.report.incarnation == report.incarnation:
            actor = member.actor
        if actor is None:
            return self._answer(known=False)
        self.version += 1
        if member is None or member.report.incarnation != report.incarnation:
            self.names_version = self.version
        self.members[report.engine] = Member(report, actor, now, self.version)
        return self._answer(known=True)

    def on_gone(self, engine: str) -> None:
        """An engine said goodbye, or its replica says that it died."""
        if self.members.pop(engine, None) is not None:
            self.version += 1
            self.names_version = self.version

    @property
    def interval_s(self) -> float:
        """How far apart an engine's reports are, those of news that cannot wait excepted."""
        return max(MIN_INTERVAL_S, len(self.members) * REPORT_S)

    @property
    def _slack(self) -> float:
        return self.interval_s - MIN_INTERVAL_S

    def tick(self, now: float) -> None:
        """Drop engines that have been silent for long."""
        for name in [name for name, member in self.members.items() if member.silent_s(now) > GONE_S + self._slack]:
            self.on_gone(name)

    def suspects(self, now: float) -> list[str]:
        """Engines that should have been heard of, and are to be asked whether they live."""
        return [name for name, member in self.members.items() if self._suspect(member, now)]

    def on_answer(self, engine: str, incarnation: float, now: float) -> None:
        """A suspect lives: it is taken back at once, with the load it last told of."""
        member = self.members.get(engine)
        if member is not None and member.report.incarnation == incarnation:
            member.answered = now

    def _suspect(self, member: Member, now: float) -> bool:
        return member.silent_s(now) > SUSPECT_S + self._slack

    def view(self, now: float, since: Any = None, known: Collection[str] = ()) -> dict[str, Any]:
        """What has changed for an ingress since the view whose "version" was `since`; everything if that is not ours.

        {"v", "version", "names": all engines, or None if none came or went,
        "engines": {id: {"actor", "report", "silent_s"}}}. Actors are large to send: they are None for the engines that
        the ingress knows already. What could move is nothing to ingresses.
        """
        last = since[1] if isinstance(since, list | tuple) and since[0] == self.id else -1
        engines = {
            name: {
                "actor": None if name in known else member.actor,
                "report": {**member.report.to_message(), "movable": ()},
                "silent_s": now - member.heard,
            }
            for name, member in self.members.items()
            if member.changed > last or name not in known
        }
        names = list(self.members) if self.names_version > last else None
        return {"v": PROTOCOL_VERSION, "version": [self.id, self.version], "names": names, "engines": engines}

    def is_current(self, since: Any) -> bool:
        """Whether a view with that version would say nothing new."""
        return isinstance(since, list | tuple) and list(since) == [self.id, self.version]

    def reports(self, now: float) -> list[LoadReport]:
        """Of the engines that have given a sign of life lately: the others may be gone."""
        return [member.report for member in self.members.values() if not self._suspect(member, now)]

    def snapshot(self, now: float, settings: LlumnixSettings = DEFAULTS) -> dict[str, Any]:
        """For people and metrics: every engine with its state and freeness."""
        replicas = []
        for name, member in sorted(self.members.items()):
            report = member.report
            state = "suspect" if self._suspect(member, now) else report.state
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

    def _answer(self, known: bool) -> dict[str, Any]:
        return {"v": PROTOCOL_VERSION, "known": known, "interval_s": self.interval_s}
