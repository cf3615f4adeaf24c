"""The manager as a Serve deployment: a thin adapter around llumnix.manager, plus the metrics of all processes.

One replica, soft state: after its restart engines report with their next change or heartbeat (two seconds), and
ingresses go on meanwhile with the view they have. Ingresses follow by a long poll that answers within POLL_S, never by
an endless stream: an open stream would hold up shutdown and updates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray import serve

from llumnix.load import DRAINING, MIXED, PROTOCOL_VERSION, READY
from llumnix.manager import GONE_S, ClusterView, Member
from llumnix.policies.choice import DRAIN, OPERATOR
from llumnix.policies.roles import assign
from llumnix.rescheduler import COMMAND_TIMEOUT_S, Command, Rescheduler
from llumnix.settings import DEFAULTS, LlumnixSettings, parse_ratio
from serving import clock
from serving.logs import configure_logging
from serving.metrics import Family, render
from serving.move_metrics import Downtimes, move_families
from serving.receipt import receipt_line

logger = logging.getLogger("ferry.manager")

POLL_S = 1.0
SNAPSHOT_TIMEOUT_S = 1.0
LOGGED = ("request_id", "source", "destination", "cause", "mechanism", "outcome", "reason", "duration_ms", "held_ms")
GAPS_S = 2.0  # after a drain, until its ingresses have told of the gaps they saw
KEPT_DRAINS = 50
GATHER_S = 0.05  # between answers to an ingress: changes that come meanwhile are answered together


@serve.deployment(
    name="Manager",
    num_replicas=1,
    max_surge_percent=100,  # an update starts the new one first: engines drain meanwhile, and need one
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=10_000,
    graceful_shutdown_timeout_s=2,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_period_s=1,
    health_check_timeout_s=5,
)
class Manager:
    def __init__(self, log_level: str = "INFO") -> None:
        configure_logging(log_level)
        self.cluster = ClusterView(started=time.monotonic())
        self.rescheduler = Rescheduler(replace(DEFAULTS, enable_moves=False))
        self.settings_version = 0
        self.roles: dict[str, str] = {}
        self.sources: dict[str, tuple[float, list[Family]]] = {}  # process -> when, its metrics
        self.changed = asyncio.Event()
        self.downtimes = Downtimes()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.pairing: asyncio.Task[Any] | None = None
        self.urgent = asyncio.Event()  # a round is due at once
        self.drains: deque[dict[str, Any]] = deque(maxlen=KEPT_DRAINS)  # receipts

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """`user_config`: {"llumnix": settings that differ from the defaults}; may change while everything runs."""
        settings = LlumnixSettings.from_dict(user_config.get("llumnix", {}))
        if settings != self.rescheduler.settings:
            self.rescheduler.settings = settings
            self.settings_version += 1

    async def report(self, message: dict[str, Any]) -> dict[str, Any]:
        """A load report of an engine, with its metrics now and then."""
        if self.pairing is None:  # whoever reports first finds a running loop
            self.pairing = asyncio.get_running_loop().create_task(self._pair())
        before = self.cluster.version
        drained_before = self._drains(message["engine"])
        answer = self.cluster.on_report(message, clock.now())
        if not drained_before and self._drains(message["engine"]):
            self.urgent.set()
        if "metrics" in message:
            self._take_metrics(message["engine"], message["metrics"])
        self._notify(before)
        answer["role"] = self.roles.get(message["engine"], MIXED)
        if message.get("settings") != self.settings_version:
            answer["settings"] = self.rescheduler.settings.to_message()
            answer["settings_version"] = self.settings_version
        return answer

    async def drained(self, receipt: dict[str, Any]) -> None:
        """An engine is empty and about to end; see EngineNode.drain."""
        before = self.cluster.version
        self.cluster.on_gone(receipt["engine"])
        self._notify(before)
        if receipt["moved"] or receipt["resumed"] or receipt["finished"]:
            self._spawn(self._log_receipt(receipt))

    async def _log_receipt(self, receipt: dict[str, Any]) -> None:
        await asyncio.sleep(GAPS_S)
        receipt = {**receipt, **self.rescheduler.receipt(receipt["engine"]), "at": time.time()}
        self.drains.append(receipt)
        logger.info("%s", receipt_line(receipt))

    async def downtime(self, moves: list[tuple[str, list[int], float]]) -> None:
        """What an ingress saw of moves: (request, epoch after it, seconds between two tokens)."""
        for request_id, epoch, seconds in moves:
            cause = self.rescheduler.downtime(request_id, epoch, seconds)
            self.downtimes.observe(cause or "unknown", seconds)

    async def metrics(self, source: str, families: list[Family]) -> None:
        """The metrics of an ingress."""
        self._take_metrics(source, families)

    async def view(self, version: int, known: list[str]) -> dict[str, Any]:
        """The cluster view, soon after it differs from `version`, after POLL_S at the latest; without the actors of
        the engines in `known`. Busy engines change it all the time: every answer waits for what GATHER_S brings."""
        before = self.cluster.version
        self.cluster.tick(clock.now())
        self._notify(before)
        if version == self.cluster.version:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), POLL_S)
        await asyncio.sleep(GATHER_S)
        return self.cluster.view(clock.now(), known)

    async def metrics_text(self) -> bytes:
        """All processes' metrics in Prometheus's text format."""
        own = move_families(self.rescheduler, self.cluster, self.downtimes)
        return render([*(families for _, families in self.sources.values()), own])

    async def migrate(self, request_id: str, destination: str, options: dict[str, Any]) -> dict[str, Any]:
        """Move one request because an operator says so: what became of it, or {"error": kind, "message": str}."""
        target = self.cluster.members.get(destination)
        if target is None:
            return {"error": "not_found", "message": f"no replica {destination!r}; GET /cluster lists them"}
        found = await self._find(request_id)
        if found is None:
            return {"error": "not_found", "message": f"no replica has a request {request_id!r}"}
        source, name = found
        if source == destination:
            return {"error": "conflict", "message": f"request {name} is on {destination} already"}
        command = self.rescheduler.command(source, destination, OPERATOR, 1, 1 << 30, clock.now())
        results = await self._carry_out(command, {"request_id": name, **options})
        if not results:
            return {
                "error": "conflict",
                "message": f"request {name} cannot move now: it is in its prefill, or has ended",
            }
        if results[0]["outcome"] != "moved":
            return {"error": "conflict", "message": f"request {name} did not move: {results[0]['reason']}"}
        return results[0]

    async def snapshot(self) -> dict[str, Any]:
        """The cluster for people; the requests are what the engines say just now."""
        now = clock.now()
        snapshot = self.cluster.snapshot(now)
        requests = await self._requests()
        for replica in snapshot["replicas"]:
            replica["requests"] = requests.get(replica["id"], [])
        snapshot["moves"] = list(self.rescheduler.moves)
        snapshot["manager"] |= {
            "rounds": self.rescheduler.rounds,
            "moves_under_way": len(self.rescheduler.open),
            "settings": self.rescheduler.settings.to_message(),
            "drains": list(self.drains),
        }
        return snapshot

    # -- rescheduling -------------------------------------------------------------------------------------------

    async def _pair(self) -> None:
        seen = -1
        while True:
            await self._until_next_round()
            try:
                now = clock.now()
                urgent = self.urgent.is_set()
                self.urgent.clear()
                if self.cluster.version == seen and not self.rescheduler.open and not urgent:
                    continue
                seen = self.cluster.version
                self._assign_roles()
                for command in self.rescheduler.round(self.cluster.reports(now), now):
                    self._spawn(self._carry_out(command, {}))
            except Exception:
                logger.exception("a round of pairing failed")

    async def _until_next_round(self) -> None:
        """An interval, or a quarter of it when something is urgent: rounds never follow each other without pause."""
        interval = self.rescheduler.settings.pairing_interval_s
        await asyncio.sleep(interval / 4)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.urgent.wait(), 3 * interval / 4)

    def _drains(self, engine: str) -> bool:
        """An engine is known to drain and to have requests to give."""
        member = self.cluster.members.get(engine)
        return member is not None and member.report.state == DRAINING and bool(member.report.movable)

    def _assign_roles(self) -> None:
        live = {m.report.engine: m.report.role for m in self.cluster.members.values() if m.report.state == READY}
        self.roles = assign(live, parse_ratio(self.rescheduler.settings.pd_ratio))

    async def _carry_out(self, command: Command, more: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a command to its source and take in what it did."""
        source = self.cluster.members.get(command.source)
        destination = self.cluster.members.get(command.destination)
        results: list[dict[str, Any]] = []
        if source is not None and destination is not None:
            message = {
                "v": PROTOCOL_VERSION,
                "destination": command.destination,
                "actor": destination.actor,
                "cause": command.cause,
                "count": command.count,
                "max_blocks": command.max_blocks,
                "waiting": command.waiting,
                "prefill_tokens_per_s": destination.report.prefill_tokens_per_s,
                "settings": self.rescheduler.settings.to_message(),
                **more,
            }
            try:
                results = await asyncio.wait_for(source.actor.migrate.remote(message), COMMAND_TIMEOUT_S)
            except Exception as error:  # the source is gone, or hangs: its ingresses know what to do
                logger.warning("engine %s did not carry out a move: %s", command.source, type(error).__name__)
        self.rescheduler.done(command, results, time.time())
        if command.cause == DRAIN:
            self.urgent.set()
        for result in results:
            logger.info("move %s", {key: result[key] for key in LOGGED})
        return results

    async def _requests(self) -> dict[str, list[dict[str, Any]]]:
        """Engine -> its requests; an engine that does not answer in time is missing."""

        async def ask(member: Member) -> list[dict[str, Any]]:
            answer = await asyncio.wait_for(member.actor.snapshot.remote(), SNAPSHOT_TIMEOUT_S)
            return answer["requests"]

        members = dict(self.cluster.members)
        answers = await asyncio.gather(*(ask(member) for member in members.values()), return_exceptions=True)
        return {name: a for name, a in zip(members, answers, strict=True) if not isinstance(a, BaseException)}

    async def _find(self, request_id: str) -> tuple[str, str] | None:
        """(engine, sequence) of a request: its own name, or the public one of a response with one sequence."""
        for engine, requests in (await self._requests()).items():
            for request in requests:
                if request["id"] in (request_id, f"{request_id}-0"):
                    return engine, request["id"]
        return None

    def _take_metrics(self, source: str, families: list[Family]) -> None:
        now = clock.now()
        self.sources[source] = (now, families)
        for name in [name for name, (when, _) in self.sources.items() if now - when > GONE_S]:
            del self.sources[name]

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _notify(self, before: int) -> None:
        if self.cluster.version != before:
            self.changed.set()
            self.changed = asyncio.Event()
