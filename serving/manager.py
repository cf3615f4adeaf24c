"""The manager as a Serve deployment: a thin adapter around llumnix.manager, plus the metrics of all processes.

One replica, soft state: after its restart engines report with their next change or heartbeat (two seconds), and
ingresses go on meanwhile with the view they have. Ingresses follow by a long poll that answers within POLL_S, never by
an endless stream: an open stream would hold up shutdown and updates.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from zlib import crc32

from ray import serve
from ray.exceptions import ActorDiedError

from engine.config import ConfigError
from engine.values import shown
from llumnix.load import DRAINING, PROTOCOL_VERSION, READY
from llumnix.manager import GONE_S, ClusterView, Member
from llumnix.migration import Mechanism
from llumnix.policies.choice import DRAIN, OPERATOR
from llumnix.policies.roles import assign
from llumnix.rescheduler import COMMAND_TIMEOUT_S, Command, Key, Rescheduler, key_of
from llumnix.settings import DEFAULTS, LlumnixSettings, parse_ratio
from llumnix.transfer import KVTransfer
from serving import clock
from serving.cluster_api import SNAPSHOT_TIMEOUT_S
from serving.logs import configure_logging
from serving.metrics import Family, render
from serving.move_metrics import Downtimes, move_families
from serving.receipt import receipt_line
from serving.reporting import HEARTBEAT_S
from serving.rescheduling import parse_user_config

logger = logging.getLogger("ferry.manager")

POLL_S = 1.0
MEASURING = ("use_cached", "chunk_bytes")  # options of a move for tests and benchmarks
PROBE_S = 1.0  # between looks for suspects, and for their answer
REQUEST_KEYS = ("id", "status", "priority", "tokens")  # of a request in /cluster
LOGGED = ("request_id", "source", "destination", "cause", "mechanism", "outcome", "reason", "duration_ms", "held_ms")
GAPS_S = 2.0  # after a drain, until its ingresses have told of the gaps they saw
KEPT_DRAINS = 50
SETTLE_S = 2 * HEARTBEAT_S  # after the first report, until even idle engines have told of theirs
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
        self.cluster = ClusterView(os.urandom(6).hex(), time.monotonic())
        self.rescheduler = Rescheduler(replace(DEFAULTS, enable_moves=False))
        self.settings_version = _version(self.rescheduler.settings)
        self.transfer = KVTransfer()
        self.configured = False
        self.settings_error = ""  # why the newest user_config is not in force
        self.roles: dict[str, str] = {}
        self.settled_at = 0.0  # when roles may be assigned
        self.sources: dict[str, tuple[float, list[Family]]] = {}  # process -> when, its metrics
        self.changed = asyncio.Event()
        self.downtimes = Downtimes()
        self.early: dict[Key, tuple[float, float]] = {}  # (when told, seconds) of moves not known to be over
        self.tasks: set[asyncio.Task[Any]] = set()
        self.pairing: asyncio.Task[Any] | None = None
        self.urgent = asyncio.Event()  # a round is due at once
        self.drains: deque[dict[str, Any]] = deque(maxlen=KEPT_DRAINS)  # receipts

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """`user_config`: {"llumnix": settings, "kv_transfer": how KV travels}, in both what differs from the defaults;
        may change while everything runs. With a wrong one the settings in force stay; when the manager starts these
        are the defaults: it may be a restart, and without a manager nobody hears of engines."""
        try:
            settings, transfer = parse_user_config(user_config)
        except Exception as error:
            if not self.configured:
                self.rescheduler.settings = DEFAULTS
                self.settings_version = _version(DEFAULTS)
            self.settings_error = (str(error).splitlines() or [type(error).__name__])[0]
            logger.error("the settings stay as they are: %s", error)
            return
        self.configured, self.settings_error = True, ""
        self.transfer, self.rescheduler.settings = transfer, settings
        self.settings_version = _version(settings)  # who reports or asks for the view hears of it with the answer

    async def report(self, message: dict[str, Any]) -> dict[str, Any]:
        """A load report of an engine, with its metrics now and then."""
        if self.pairing is None:  # whoever reports first finds a running loop
            self.settled_at = clock.now() + SETTLE_S
            self.pairing = asyncio.get_running_loop().create_task(self._pair())
            self._spawn(self._look_after_suspects())
        before = self.cluster.version
        drained_before = self._drains(message["engine"])
        answer = self.cluster.on_report(message, clock.now())
        if not drained_before and self._drains(message["engine"]):
            self.urgent.set()
        if "metrics" in message:
            self._take_metrics(message["engine"], message["metrics"])
        self._notify(before)
        if message["engine"] in self.roles:  # else it keeps what it has: this manager may have just started
            answer["role"] = self.roles[message["engine"]]
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

    async def downtime(self, moves: list[tuple[str, Iterable[int], float]]) -> None:
        """What an ingress saw of moves: (request, epoch after it, seconds between two tokens)."""
        now = clock.now()
        for request_id, epoch, seconds in moves:
            cause = self.rescheduler.downtime(request_id, epoch, seconds)
            if cause is not None:
                self.downtimes.observe(cause, seconds)
            else:  # its source has not told yet
                self.early[key_of(request_id, epoch)] = now, seconds
        while self.early and now - next(iter(self.early.values()))[0] > COMMAND_TIMEOUT_S:
            _, seconds = self.early.pop(next(iter(self.early)))
            self.downtimes.observe("unknown", seconds)

    def _match_downtimes(self, moves: list[dict[str, Any]]) -> None:
        """Of moves that have just become known, what ingresses have told before."""
        for move in moves:
            if move["epoch"] is not None:
                _, seconds = self.early.pop(key_of(move["request_id"], move["epoch"]), (0.0, None))
                if seconds is not None:
                    self.downtimes.observe(
                        self.rescheduler.downtime(move["request_id"], move["epoch"], seconds) or "unknown", seconds
                    )

    async def metrics(self, source: str, families: list[Family]) -> None:
        """The metrics of an ingress."""
        self._take_metrics(source, families)

    async def view(self, version: Any, known: list[str], settings_version: int = -1) -> dict[str, Any]:
        """The cluster view, soon after it differs from `version`, after POLL_S at the latest; without the actors of
        the engines in `known`, and with the settings only if theirs is not `settings_version`. Busy engines change the
        view all the time: every answer waits for what GATHER_S brings."""
        before = self.cluster.version
        self.cluster.tick(clock.now())
        self._notify(before)
        if self.cluster.is_current(version):
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), POLL_S)
        await asyncio.sleep(GATHER_S)
        view = self.cluster.view(clock.now(), version, known)
        if settings_version != self.settings_version:
            view["settings"] = self.rescheduler.settings.to_message()
            view["settings_version"] = self.settings_version
        return view

    async def metrics_text(self) -> bytes:
        """All processes' metrics in Prometheus's text format."""
        own = move_families(self.rescheduler, self.cluster, self.downtimes)
        return render([*(families for _, families in self.sources.values()), own])

    async def knows_engines(self) -> bool:
        """False for a manager that has just started: it hears of the engines within moments."""
        return bool(self.cluster.members)

    async def migrate(self, request_id: str, destination: str, options: dict[str, Any]) -> dict[str, Any]:
        """Move one request because an operator says so: the move, or {"error": kind, "message": str}.

        `options` of this one move: "mechanism" (llumnix.migration.Mechanism) and the keys of kv_transfer_config.
        """
        wrong = _wrong_option(options)
        if wrong:
            return _error("bad_request", wrong)
        if destination not in self.cluster.members:
            return _error("not_found", f"no replica {destination!r}; GET /cluster lists them")
        found = await self._find(request_id)
        if found is None:
            return _error("not_found", f"no replica has a request {request_id!r}; GET /cluster lists them")
        source, name = found
        if source == destination:
            return _error("conflict", f"request {name} is on {destination} already")
        command = self.rescheduler.command(source, destination, OPERATOR, 1, 1 << 30, clock.now())
        results = await self._carry_out(command, {"request_id": name, **options})
        if results is None:
            return _error("conflict", f"replica {source} did not carry the move out; its log says why")
        if not results:
            return _error("conflict", f"request {name} cannot move now: it is in its prefill, or has ended")
        move = results[0]
        match move["outcome"]:
            case "moved":
                return for_people(move)
            case "unconfirmed":
                return _error("conflict", f"whether request {name} moved is not known: {move['reason']}")
        return _error("conflict", f"request {name} did not move: {move['reason']}")

    async def snapshot(self) -> dict[str, Any]:
        """The cluster for people; the requests are what the engines say just now."""
        now = clock.now()
        snapshot = self.cluster.snapshot(now, self.rescheduler.settings)
        requests = await self._requests()
        for replica in snapshot["replicas"]:
            found = requests.get(replica["id"], [])
            replica["requests"] = [{key: request[key] for key in REQUEST_KEYS} for request in found]
        snapshot["moves"] = [for_people(move) for move in self.rescheduler.moves]
        snapshot["manager"] |= {
            "rounds": self.rescheduler.rounds,
            "moves_under_way": len(self.rescheduler.open),
            "settings": self.rescheduler.settings.to_message(),
            "settings_error": self.settings_error,
            "kv_transfer": self.transfer.to_message(),
            "drains": list(self.drains),
        }
        return snapshot

    # -- suspects -----------------------------------------------------------------------------------------------

    async def _look_after_suspects(self) -> None:
        asked: set[str] = set()
        while True:
            await asyncio.sleep(PROBE_S)
            for name in self.cluster.suspects(clock.now()):
                if name not in asked:
                    asked.add(name)
                    self._spawn(self._probe(name, asked))

    async def _probe(self, name: str, asked: set[str]) -> None:
        """Ask an engine whether it lives. Its reports may be what does not come through."""
        member = self.cluster.members[name]
        before = self.cluster.version
        try:
            await asyncio.wait_for(member.actor.ping.remote(), PROBE_S)
            self.cluster.on_answer(name, member.report.incarnation, clock.now())
        except ActorDiedError:
            if self.cluster.members.get(name) is member:
                self.cluster.on_gone(name)
        except Exception as error:  # no answer, or an engine that says that it is ill
            logger.debug("engine %s is suspect: %s", name, type(error).__name__)
        finally:
            asked.discard(name)
        self._notify(before)

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
        """From what the engines say they are, once all that are there have said it."""
        if clock.now() < self.settled_at:
            return
        live = [member.report for member in self.cluster.members.values() if member.report.state == READY]
        self.roles = assign(
            {report.engine: self.roles.get(report.engine, report.role) for report in live},
            parse_ratio(self.rescheduler.settings.pd_ratio),
            {report.engine: report.running for report in live},
        )

    async def _carry_out(self, command: Command, more: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Send a command to its source and take in what it did: its moves; None if it did not answer."""
        source = self.cluster.members.get(command.source)
        destination = self.cluster.members.get(command.destination)
        results: list[dict[str, Any]] | None = None
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
                **self.transfer.to_message(),
                **more,
            }
            try:
                results = await asyncio.wait_for(source.actor.migrate.remote(message), COMMAND_TIMEOUT_S)
            except Exception as error:  # the source is gone, or hangs: its ingresses know what to do
                logger.warning("engine %s did not carry out a move: %s", command.source, type(error).__name__)
        moves = self.rescheduler.done(command, results or [], time.time())
        self._match_downtimes(moves)
        if command.cause == DRAIN and any(move["outcome"] == "moved" for move in moves):
            self.urgent.set()  # a drain is in a hurry; one that nobody takes from waits for the next round
        for move in moves:
            logger.info("move %s", {key: move[key] for key in LOGGED})
        return moves if results is not None else None

    async def _requests(self) -> dict[str, list[dict[str, Any]]]:
        """Engine -> its requests; an engine that does not answer in time is missing."""

        async def ask(member: Member) -> list[dict[str, Any]]:
            answer = await asyncio.wait_for(member.actor.snapshot.remote(), SNAPSHOT_TIMEOUT_S)
            return answer["requests"]

        members = dict(self.cluster.members)
        answers = await asyncio.gather(*(ask(member) for member in members.values()), return_exceptions=True)
        return {name: a for name, a in zip(members, answers, strict=True) if not isinstance(a, BaseException)}

    async def _find(self, request_id: str) -> tuple[str, str] | None:
        """(engine, sequence) of a request: its own name, or the public one of a response that has one sequence left."""
        found = [(engine, one["id"]) for engine, requests in (await self._requests()).items() for one in requests]
        exact = next((pair for pair in found if pair[1] == request_id), None)
        if exact is not None:
            return exact
        of_it = [pair for pair in found if re.fullmatch(re.escape(request_id) + "-[0-9]+", pair[1])]
        return of_it[0] if len(of_it) == 1 else None

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


def for_people(move: dict[str, Any]) -> dict[str, Any]:
    """A move as /cluster shows it."""
    return {key: value for key, value in move.items() if key != "epoch"}


def _wrong_option(options: dict[str, Any]) -> str:
    """What is wrong with the options of one move; empty if nothing is."""
    transfer = {key: value for key, value in options.items() if key not in ("mechanism", *MEASURING)}
    try:
        KVTransfer.from_dict(transfer)
    except ConfigError as error:
        return str(error)
    mechanism, known = options.get("mechanism", Mechanism.LIVE.value), [one.value for one in Mechanism]
    return "" if mechanism in known else f"mechanism is {shown(mechanism)}, must be one of {', '.join(known)}"


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": kind, "message": message}


def _version(settings: LlumnixSettings) -> int:
    """Made from the values, so that it means the same after a restart of the manager."""
    return crc32(repr(sorted(settings.to_message().items())).encode())
