"""The manager's loop as a state machine: rounds of pairing in, commands out; results in, history and counts out.

It never tracks requests: a command names two engines and a largest size, and the source picks from what it runs then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from llumnix.load import LoadReport
from llumnix.policies.choice import DRAIN, HANDOVER
from llumnix.policies.pairing import pair
from llumnix.settings import DEFAULTS, LlumnixSettings

KEPT_MOVES = 200
BATCH = 16  # requests of one command where an engine gives away all it has
COMMAND_TIMEOUT_S = 60.0  # a source that has not answered by then is free to be asked again


Key = tuple[str, int, int]  # a request and its epoch after a move


def key_of(request_id: str, epoch: Iterable[int]) -> Key:
    resume, move = epoch
    return request_id, resume, move


@dataclass(frozen=True)
class Command:
    """To the source: give up to `count` requests of at most `max_blocks` to the destination."""

    number: int
    source: str
    destination: str
    cause: str
    count: int
    max_blocks: int
    issued: float
    waiting: bool = False  # only queued requests


@dataclass
class Drained:
    """What the moves away from an engine that drains have cost so far."""

    failed: int = 0  # moves that did not happen; their requests were moved by another one, or ended
    gaps: int = 0  # moves of which the gap is known
    worst_gap_ms: float = 0.0


@dataclass
class Rescheduler:
    settings: LlumnixSettings = DEFAULTS
    open: dict[int, Command] = field(default_factory=dict)
    moves: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_MOVES))
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # (cause, outcome)
    totals: Counter[str] = field(default_factory=Counter)  # blocks_sent, blocks_skipped, bytes, stages
    drains: dict[str, Drained] = field(default_factory=dict)  # by engine
    awaited: dict[Key, dict[str, Any]] = field(default_factory=dict)  # moves whose downtime is not known, oldest first
    rounds: int = 0
    _numbers: int = 0

    def round(self, reports: Iterable[LoadReport], now: float) -> list[Command]:
        """The commands of this round. `reports`: of engines that have been heard of lately."""
        self.rounds += 1
        for number in [n for n, command in self.open.items() if now - command.issued > COMMAND_TIMEOUT_S]:
            del self.open[number]
        busy: Counter[str] = Counter()
        for command in self.open.values():
            busy[command.source] += 1
            busy[command.destination] += 1
        commands = []
        for made in pair(reports, self.settings, busy):
            count = BATCH if made.cause in (DRAIN, HANDOVER) else 1
            commands.append(
                self.command(made.source, made.destination, made.cause, count, made.max_blocks, now, made.waiting)
            )
        return commands

    def command(
        self,
        source: str,
        destination: str,
        cause: str,
        count: int,
        max_blocks: int,
        now: float,
        waiting: bool = False,
    ) -> Command:
        """A command of its own number; the engines are busy until `done`."""
        self._numbers += 1
        command = Command(self._numbers, source, destination, cause, count, max_blocks, now, waiting)
        self.open[command.number] = command
        return command

    def done(self, command: Command, results: Iterable[dict[str, Any]], at: float) -> list[dict[str, Any]]:
        """What a source did; returns the moves as the history keeps them. `at`: seconds since the epoch, for people."""
        self.open.pop(command.number, None)
        moves = [{**result, "downtime_ms": None, "at": at - result.pop("ended_s_ago", 0.0)} for result in results]
        for key in [*takewhile(lambda key: at - self.awaited[key]["at"] > COMMAND_TIMEOUT_S, self.awaited)]:
            del self.awaited[key]
        for result in moves:
            if result["epoch"] is not None:
                self.awaited[key_of(result["request_id"], result["epoch"])] = result
            self.counts[result["cause"], result["outcome"]] += 1
            for name in ("blocks_sent", "blocks_skipped", "bytes", "stages"):
                self.totals[name] += result[name]
            self.moves.append(result)
            if result["cause"] == DRAIN:
                drained = self.drains.setdefault(result["source"], Drained())
                drained.failed += result["outcome"] != "moved"
        return moves

    def downtime(self, request_id: str, epoch: Iterable[int], seconds: float) -> str | None:
        """What an ingress saw of a move: its last token before to its first after. Returns the cause; None if no such
        move is known, or not yet."""
        move = self.awaited.pop(key_of(request_id, epoch), None)
        if move is None:
            return None
        move["downtime_ms"] = 1e3 * seconds
        if move["cause"] == DRAIN and move["source"] in self.drains:
            drained = self.drains[move["source"]]
            drained.gaps += 1
            drained.worst_gap_ms = max(drained.worst_gap_ms, 1e3 * seconds)
        return str(move["cause"])

    def receipt(self, engine: str) -> dict[str, Any]:
        """What the moves of an engine that has drained have cost, to be asked once."""
        drained = self.drains.pop(engine, Drained())
        return {
            "moves_failed": drained.failed,
            "gaps_seen": drained.gaps,
            "worst_gap_ms": drained.worst_gap_ms if drained.gaps else None,
        }
