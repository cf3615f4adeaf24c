"""`ferry top`: the cluster as a live table, from GET /cluster."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

TIMEOUT_S = 5.0
BAR = 24  # characters
PIPE_WIDTH = 160
MOVES_SHOWN = 12
ID_CHARS = 12
STATES = {"ready": "green", "draining": "yellow", "starting": "cyan", "suspect": "red"}
OUTCOMES = {"moved": "green", "aborted": "yellow", "refused": "red", "unconfirmed": "red"}


class Unreachable(Exception):
    """The service gave no answer; the message is one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default %(default)s)")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, help="seconds between looks, at least 0.1 (default %(default)g)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")


def run(arguments: argparse.Namespace) -> int:
    """Until Ctrl-C. Returns the exit code: 1 when the service is not there."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    try:
        cluster = fetch(arguments.url)
        if arguments.once:
            console.print(frame(cluster, time.time()))
            return 0
        with Live(frame(cluster, time.time()), console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(arguments.interval)
                try:
                    cluster, error = fetch(arguments.url), ""
                except Unreachable as gone:
                    error = str(gone)
                live.update(frame(cluster, time.time(), error), refresh=True)
    except Unreachable as error:
        print(f"ferry top: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def fetch(url: str) -> dict[str, Any]:
    """The snapshot of /cluster. Raises Unreachable."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/cluster", timeout=TIMEOUT_S) as response:
            found = json.load(response)
            if "replicas" in found and "moves" in found:
                return found
        raise Unreachable(f"{url} answers, but is no Ferry service")
    except urllib.error.HTTPError as error:
        raise Unreachable(f"{url}/cluster answers {error.code}: {_reason(error)}") from None
    except ValueError as error:
        raise Unreachable(f"{url} is no address of a Ferry service: {error}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise Unreachable(f"no service at {url} ({reason}); start one with ferry serve, or give --url") from None


def frame(cluster: dict[str, Any], now: float, error: str = "") -> RenderableType:
    """One picture: a line a replica, then a line a move, newest first."""
    parts: list[RenderableType] = [_title(cluster), _replicas(cluster["replicas"])]
    parts.append(_moves(cluster["moves"], now) if cluster["moves"] else Text("no request has moved yet", style="dim"))
    if error:
        parts.append(Text(f"{error}; this is the last answer", style="bold red"))
    return Group(*parts)


def _title(cluster: dict[str, Any]) -> Text:
    ready = sum(replica["state"] == "ready" for replica in cluster["replicas"])
    counts = Counter(move["outcome"] for move in cluster["moves"])
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "none"
    settings = cluster["manager"].get("settings", {})
    moves = "on" if settings.get("enable_moves") else "only drains and operators"
    return Text.assemble(
        (f"{ready}/{len(cluster['replicas'])} replicas ready", "bold"),
        f"   rescheduling: {moves}   dispatch: {settings.get('dispatch_policy', '?')}   last moves: {outcomes}",
    )


def _replicas(replicas: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (
        *(("replica", "left"), ("role", "left"), ("state", "left"), ("KV in use", "left"), ("blocks", "right")),
        *(("freeness", "right"), ("running", "right"), ("queued", "right"), ("moving", "right")),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for replica in replicas:
        blocks, counts = replica["blocks"], Counter(request["status"] for request in replica["requests"])
        if not counts:  # idle, or it did not answer just now: what it last reported
            counts.update(running=replica["running"], queued=replica["waiting"])
        used = blocks["total"] - blocks["free"]
        state = replica["state"] if replica["state"] != "starting" else f"starting: {replica['phase']}"
        table.add_row(
            replica["id"][:ID_CHARS],
            replica["role"],
            Text(state, style=STATES.get(replica["state"], "")),
            bar(used, blocks["cached"], blocks["total"]),
            f"{used}/{blocks['total']}",
            f"{replica['freeness']:.0f}",
            str(counts["running"]),
            str(counts["queued"]),
            str(counts["moving"]),
        )
    return table


def bar(used: int, cached: int, total: int) -> Text:
    """Blocks in use, then those that are free but hold a known prefix, then the rest."""
    if total == 0:
        return Text("·" * BAR, style="dim")
    full = min(BAR, -(-used * BAR // total))
    known = min(BAR - full, round(cached * BAR / total))
    share = used / total
    style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(("█" * full, style), ("░" * known, "blue"), ("·" * (BAR - full - known), "dim"))


def _moves(moves: list[dict[str, Any]], now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (
        *(("ago", "right"), ("request", "left"), ("from", "left"), ("to", "left"), ("cause", "left")),
        *(("outcome", "left"), ("how", "left"), ("blocks", "right"), ("took", "right"), ("downtime", "right")),
    ):
        table.add_column(name, justify=justify, no_wrap=name != "outcome")  # type: ignore[arg-type]
    for move in list(reversed(moves))[:MOVES_SHOWN]:
        downtime = move["downtime_ms"]
        why = f"{move['outcome']}: {move['reason']}" if move.get("reason") else move["outcome"]
        table.add_row(
            f"{max(0.0, now - move['at']):.0f} s",
            _short(move["request_id"]),
            move["source"][:ID_CHARS],
            move["destination"][:ID_CHARS],
            move["cause"],
            Text(why, style=OUTCOMES.get(move["outcome"], "")),
            move.get("mechanism", ""),
            f"{move['blocks_sent']}+{move['blocks_skipped']}",
            f"{move['duration_ms']:.0f} ms",
            "" if downtime is None else f"{downtime:.1f} ms",
        )
    return table


def _short(request_id: str) -> str:
    """The end of an id tells requests apart: chatcmpl-... is the same in all."""
    return request_id if len(request_id) <= ID_CHARS else f"…{request_id[1 - ID_CHARS :]}"


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except Exception:  # not ours
        return str(error.reason)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0.1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a number of at least 0.1")
    return value
