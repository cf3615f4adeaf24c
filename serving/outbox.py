"""An engine's side of its ingresses: what each is to receive, what it has acknowledged, when it was last heard of.

Pure bookkeeping with the time passed in; the engine actor's streams and lease calls sit on top of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from serving.messages import LEASE, Output, error_output, is_terminal

NEVER, FIRST = [-1, -1], [0, 0]  # epochs


@dataclass
class Client:
    """One ingress. `history` keeps outputs by request until they are acknowledged, for replays and new streams."""

    last_seen: float
    pending: list[Output] = field(default_factory=list)
    taken: float = 0.0  # when a stream last took what was pending, or there was nothing
    history: dict[str, list[Output]] = field(default_factory=dict)
    open: dict[str, list[int]] = field(default_factory=dict)  # requests without a terminal output -> epoch
    newest: dict[str, list[int]] = field(default_factory=dict)  # requests here of late -> highest epoch seen
    ended: dict[str, float] = field(default_factory=dict)  # requests with one -> when
    closed: dict[str, float] = field(default_factory=dict)  # requests of which it wants nothing more -> since when

    def queue(self, output: Output, now: float) -> None:
        if not self.pending:
            self.taken = now
        self.pending.append(output)


class Outboxes:
    """All ingresses of one engine."""

    def __init__(self, lease_s: float, forget_s: float = 60.0):
        self.lease_s = lease_s
        self.forget_s = forget_s
        self.clients: dict[str, Client] = {}

    def open_requests(self) -> set[str]:
        """The requests without a terminal output."""
        return {request_id for client in self.clients.values() for request_id in client.open}

    def seen(self, name: str, now: float) -> Client:
        """An ingress gave a sign of life."""
        client = self.clients.get(name)
        if client is None:
            client = self.clients[name] = Client(now)
        client.last_seen = now
        return client

    def opened(self, name: str, request_id: str, epoch: list[int], now: float) -> bool:
        """An ingress submitted a request (again, with a higher epoch, after a resume), or it has moved here.

        False if it is nothing new: the message came twice, or was overtaken by a newer life.
        """
        client = self.seen(name, now)
        if epoch <= client.newest.get(request_id, NEVER):
            return False
        client.open[request_id] = client.newest[request_id] = epoch
        client.history[request_id] = []
        client.ended.pop(request_id, None)
        client.closed.pop(request_id, None)
        return True

    def closed(self, name: str, request_id: str, now: float) -> None:
        """An ingress wants nothing more of a request. Its epoch is remembered for a lease: a submission that comes
        twice must not start it anew."""
        client = self.clients.get(name)
        if client is not None:
            for table in (client.open, client.history, client.ended):
                table.pop(request_id, None)
            if request_id in client.newest:
                client.closed[request_id] = now

    def push(self, name: str, outputs: Iterable[Output], now: float) -> None:
        """Queue outputs for an ingress; those of requests it no longer wants, or has submitted anew, are dropped."""
        client = self.clients.get(name)
        if client is None:
            return
        for output in outputs:
            request_id = output["id"]
            if request_id not in client.open or output["epoch"] < client.open[request_id]:
                continue
            client.queue(output, now)
            client.history[request_id].append(output)
            if is_terminal(output) or "moved" in output:
                del client.open[request_id]
                client.ended[request_id] = now

    def untaken_s(self, name: str, now: float) -> float:
        """How long outputs for an ingress have waited for a stream that takes them."""
        client = self.clients.get(name)
        return now - client.taken if client is not None and client.pending else 0.0

    def take(self, name: str) -> list[Output]:
        """Everything queued for an ingress since the last call."""
        client = self.clients.get(name)
        if client is None:
            return []
        taken, client.pending = client.pending, []
        return taken

    def acknowledge(
        self, name: str, cursors: dict[str, int], now: float, epochs: dict[str, list[int]] | None = None
    ) -> list[str]:
        """A lease renewal: drop what the ingress has, repeat ends that it should have had for long.

        Returns the requests it expects here, each under its epoch, that are not here: an older life is not what it
        waits for.
        """
        client = self.seen(name, now)
        for request_id, history in client.history.items():
            cursor = cursors.get(request_id)
            if cursor is not None:
                client.history[request_id] = [o for o in history if o["index"] >= cursor or o["index"] < 0]
        unknown = [
            request_id
            for request_id in cursors
            if request_id not in client.history or client.newest[request_id] < (epochs or {}).get(request_id, FIRST)
        ]
        for request_id, when in list(client.ended.items()):
            if now - when <= self.lease_s or request_id in unknown:
                continue
            if request_id not in cursors:
                self.closed(name, request_id, now)
            else:  # its end was lost with a stream: nothing that follows would show the gap
                client.ended[request_id] = now
                for output in client.history[request_id]:
                    client.queue(output, now)
        return unknown

    def unacknowledged(self, name: str, request_id: str) -> list[Output]:
        """The tokens of a request that its ingress has not said it has."""
        client = self.clients.get(name)
        return list(client.history.get(request_id, ())) if client is not None else []

    def replay(self, name: str, cursors: dict[str, int], now: float) -> list[Output]:
        """Outputs from the given indices on, for a new stream or a gap."""
        client = self.seen(name, now)
        outputs: list[Output] = []
        for request_id, cursor in cursors.items():
            outputs += [o for o in client.history.get(request_id, ()) if o["index"] >= cursor or o["index"] < 0]
        return outputs

    def expire(self, now: float) -> list[tuple[str, list[int]]]:
        """End the requests of ingresses whose lease ran out; returns (request, epoch) pairs to abort.

        The ingress finds a LEASE error in its stream should it come back. Much later it is forgotten.
        """
        aborted: list[tuple[str, list[int]]] = []
        for name, client in list(self.clients.items()):
            for request_id in [r for r, when in client.closed.items() if now - when > self.lease_s]:
                del client.closed[request_id], client.newest[request_id]
            silent = now - client.last_seen
            if silent > self.lease_s:
                lost = list(client.open.items())
                aborted += lost
                self.push(name, [error_output(request_id, epoch, LEASE) for request_id, epoch in lost], now)
            if silent > max(self.forget_s, self.lease_s):
                del self.clients[name]
        return aborted
