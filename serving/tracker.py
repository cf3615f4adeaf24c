"""The ingress's side of every request: who owns it, which tokens have come, what to do when an engine is lost.

A pure state machine: every call takes the time and returns effects; the ingress carries them out. Rules it holds:

- Ownership is (request, epoch), epoch = (resume, move). Only the tracker raises resume. It takes tokens of the highest
  epoch it has seen, and aborts an engine that shows a lower one.
- A token is accepted when its index equals the cursor, whatever its epoch: equal positions hold equal tokens. Lower
  indices are repeats, a higher one is a gap, which is asked for again, a bounded number of times.
- Errors count only from the owner: what another engine says of a request that it gave up or refused is old.
- Every request ends in exactly one terminal effect: a finish reason or a typed error.
- An engine that has let go of a request says where it is now. Nobody goes on where it was: if it is not there either,
  it is started again, first of all where it was, whose cache has its KV.
- A lost engine first means looking: for a moment another engine may announce the request (it moved). Then the request
  is started again from its prompt and the tokens so far, a bounded number of times.
- A request that nobody takes asks again, ever more seldom, and ends when no_engine_s have passed without a token.
- Once the application is closing there is no elsewhere: a request that would need another engine ends at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.request import Epoch
from serving.messages import (
    CLOSING,
    DRAINED,
    DRAINING,
    ENGINE_LOST,
    FAILED,
    MOVE_FAILED,
    NO_ENGINE,
    QUEUE_FULL,
    RETRY_ELSEWHERE,
    TIMEOUT,
    UNKNOWN,
    Output,
    is_terminal,
)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Choose an engine (not one of `exclude`) and answer with `assigned` or `unassigned`."""

    id: str
    exclude: frozenset[str]
    prefer: str | None = None  # it has most of the request's KV in its cache


@dataclass(frozen=True, slots=True)
class Send:
    """Submit a request to an engine: its record with the tokens so far."""

    engine: str
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Abort:
    """Make an engine drop a request, if its epoch there is not newer."""

    engine: str
    id: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask an engine for a request's outputs from an index on."""

    engine: str
    id: str
    start: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand an output to the client: the next token, and with finish or error the end."""

    id: str
    output: Output


Effect = Dispatch | Send | Abort | Replay | Emit


@dataclass
class TrackerConfig:
    max_resumes: int = 3
    look_s: float = 0.2  # one report period: how long a moved request may take to announce itself
    no_engine_s: float = 30.0  # how long a request waits for an engine that takes it
    retry_s: float = 0.1  # between looks for one
    max_retry_s: float = 1.0  # between rounds in which engines are asked and refuse
    replay_s: float = 1.0  # a gap is asked for again after this long
    max_replays: int = 3  # without an answer; then the request is started again
    settle_s: float = 1.0  # an engine that has just been sent a request may not know it yet


@dataclass
class Tracked:
    """One request. `output` has every token emitted to the client; its length is the cursor."""

    id: str
    prompt: list[int]
    params: dict[str, Any]
    priority: int
    deadline: float
    epoch: Epoch = (0, 0)
    engine: str | None = None
    output: list[int] = field(default_factory=list)
    resumes: int = 0
    refused_by: set[str] = field(default_factory=set)
    full: bool = False  # the last refusal was for a full queue
    look_until: float | None = None  # its engine was lost, another one may have it
    retry_at: float | None = None  # waiting for an engine that takes it
    retry_s: float = 0.0  # the last pause between two rounds of refusals
    waiting_since: float | None = None  # no engine took it, and no token has come since
    owned_at: float = 0.0  # when `engine` became the owner
    ahead: int = 0  # the owner has shown outputs up to this index; beyond the cursor: a gap
    replay_at: float = 0.0
    replays: int = 0  # in vain
    home: str | None = None  # the engine it moved away from: its cache has the KV if the move failed
    token_at: float = 0.0  # when the last token came
    silent_since: float | None = None  # it has moved; the last token before that


class Tracker:
    """All open requests of one ingress."""

    def __init__(self, client: str, config: TrackerConfig | None = None):
        self.client = client
        self.config = config or TrackerConfig()
        self.requests: dict[str, Tracked] = {}
        self.resumed = 0  # for metrics
        self.downtimes: list[tuple[str, Epoch, float]] = []  # of moves: last token before to first token after, s
        self.closes_at: float | None = None  # the application is going away: when the last request ends

    def start(
        self, request_id: str, prompt: list[int], params: dict[str, Any], priority: int, deadline: float
    ) -> list[Effect]:
        """A new request. `deadline` is when it ends with error `timeout` at the latest."""
        request = self.requests[request_id] = Tracked(request_id, prompt, params, priority, deadline)
        return self._dispatch(request)

    def assigned(self, request_id: str, engine: str, now: float) -> list[Effect]:
        """The answer to Dispatch: this engine."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        self._own(request, engine, request.epoch, now)
        request.full = False
        message = {
            "id": request.id,
            "client": self.client,
            "prompt": request.prompt,
            "params": request.params,
            "priority": request.priority,
            "epoch": list(request.epoch),
            "output": list(request.output),
        }
        return [Send(engine, message)]

    def unassigned(self, request_id: str, now: float) -> list[Effect]:
        """The answer to Dispatch when no engine is left to ask."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        if request.full and not request.output:
            return self._end(request, QUEUE_FULL, "every replica's queue is full")
        if request.waiting_since is None:
            request.waiting_since = now
        if now - request.waiting_since >= self.config.no_engine_s:
            return self._end(request, NO_ENGINE, f"no replica took the request within {self.config.no_engine_s:g} s")
        pause = self.config.retry_s
        if request.refused_by:  # to look costs nothing, to ask all engines again does
            pause = request.retry_s = min(max(2 * request.retry_s, pause), self.config.max_retry_s)
        request.refused_by.clear()
        request.retry_at = now + pause
        return []

    def outputs(self, engine: str, outputs: Iterable[Output], now: float) -> list[Effect]:
        """What a stream brought, in its order."""
        effects: list[Effect] = []
        for output in outputs:
            request = self.requests.get(output["id"])
            epoch = (output["epoch"][0], output["epoch"][1])
            if request is None:
                if not is_terminal(output):  # what has moved is unwanted where it is now
                    effects.append(Abort(output.get("moved", engine), output["id"], epoch))
                continue
            effects += self._output(request, engine, epoch, output, now)
        return effects

    def engine_lost(self, engine: str, now: float) -> list[Effect]:
        """A stream broke or an engine is known to be dead: its requests look for a new owner, then resume."""
        for request in self.requests.values():
            if request.engine == engine:
                request.engine = None
                request.look_until = now + self.config.look_s
        return []

    def send_failed(self, engine: str, request_id: str, epoch: Epoch, now: float) -> list[Effect]:
        """The submission of that epoch did not arrive."""
        request = self.requests.get(request_id)
        if request is not None and request.engine == engine and request.epoch == epoch:
            request.engine = None
            request.look_until = now + self.config.look_s
        return []

    def cancel(self, request_id: str) -> list[Effect]:
        """The client has gone, or a stop string was found: nothing more is wanted."""
        request = self.requests.pop(request_id, None)
        if request is None or request.engine is None:
            return []
        return [Abort(request.engine, request_id, request.epoch)]

    def owners(self) -> set[str]:
        """The engines that have requests of this ingress."""
        return {request.engine for request in self.requests.values() if request.engine is not None}

    def tick(self, now: float) -> list[Effect]:
        """To be called several times a second: deadlines, resumes that are due, and engines to wait for."""
        effects: list[Effect] = []
        closed = self.closes_at is not None and now >= self.closes_at
        for request in list(self.requests.values()):
            if closed or now >= request.deadline:
                if request.engine is not None:
                    effects.append(Abort(request.engine, request.id, request.epoch))
                late = "the request took longer than the longest allowed"
                effects += self._end_closing(request) if closed else self._end(request, TIMEOUT, late)
            elif request.look_until is not None and now >= request.look_until:
                request.look_until = None
                effects += self._resume(request)
            elif request.retry_at is not None and now >= request.retry_at:
                request.retry_at = None
                effects += self._dispatch(request)
            elif request.engine is not None and request.ahead > len(request.output):
                effects += self._fill_gap(request, request.engine, now)
        return effects

    def close(self, until: float) -> list[Effect]:
        """The application is going away: nothing starts or resumes any more, and everything ends by `until`."""
        self.closes_at = until
        lost = [request for request in self.requests.values() if request.engine is None]
        return [effect for request in lost for effect in self._end_closing(request)]

    @property
    def stranded(self) -> bool:
        """Some request has found no engine that takes it."""
        return self.closes_at is None and any(r.retry_at is not None for r in self.requests.values())

    def cursors(self, engine: str) -> dict[str, int]:
        """Request id -> next index, of the requests an engine owns: the acknowledgement in a lease renewal."""
        return {r.id: len(r.output) for r in self.requests.values() if r.engine == engine}

    def epochs(self, engine: str) -> dict[str, list[int]]:
        """Request id -> the epoch under which an engine is to own it: one with an older one does not know it."""
        return {r.id: list(r.epoch) for r in self.requests.values() if r.engine == engine}

    # -- inside -------------------------------------------------------------------------------------------------

    def _output(self, request: Tracked, engine: str, epoch: Epoch, output: Output, now: float) -> list[Effect]:
        if output.get("error") == UNKNOWN:
            # No epoch goes with it. Every renewal repeats it, so one that overtook a submission can be ignored.
            settled = now - request.owned_at >= self.config.settle_s
            return self._refused(request, engine, output, now) if engine == request.engine and settled else []
        if epoch < request.epoch or (epoch == request.epoch and engine != request.engine):
            return self._from_another(request, engine, epoch, output, now)
        effects: list[Effect] = []
        owner = output.get("moved", engine)
        if epoch > request.epoch:  # it has moved: its old owner says so, or the new one speaks for the first time
            if request.engine is not None and engine != request.engine:
                effects.append(Abort(request.engine, request.id, request.epoch))
            if request.output and request.silent_since is None:
                request.silent_since = request.token_at
            request.home = request.engine
            self._own(request, owner, epoch, now)
        if owner != engine:
            request.ahead = output["index"]
            return effects
        return effects + self._from_owner(request, engine, output, now)

    def _own(self, request: Tracked, engine: str, epoch: Epoch, now: float) -> None:
        request.engine, request.epoch, request.owned_at = engine, epoch, now
        request.look_until = request.retry_at = None
        request.ahead = request.replays = 0
        request.replay_at = 0.0

    def _from_another(self, request: Tracked, engine: str, epoch: Epoch, output: Output, now: float) -> list[Effect]:
        """An engine that was lost, or whose request has moved on: its tokens count, but it must not go on computing.

        While the request looks for its owner, the lost engine may bring tokens; it is stopped once there is another.
        """
        if "moved" in output:
            return []
        looking = request.engine is None and epoch == request.epoch
        effects: list[Effect] = [] if looking or is_terminal(output) else [Abort(engine, request.id, epoch)]
        if output["index"] == len(request.output):
            effects += self._accept(request, output, now)
            if request.id not in self.requests and request.engine is not None:
                effects.append(Abort(request.engine, request.id, request.epoch))
        return effects

    def _from_owner(self, request: Tracked, engine: str, output: Output, now: float) -> list[Effect]:
        if "error" in output:
            return self._refused(request, engine, output, now)
        index = output["index"]
        request.ahead = max(request.ahead, index + 1)
        if index > len(request.output):
            return self._fill_gap(request, engine, now)
        return self._accept(request, output, now) if index == len(request.output) else []

    def _fill_gap(self, request: Tracked, engine: str, now: float) -> list[Effect]:
        if now < request.replay_at:
            return []
        if request.replays >= self.config.max_replays:
            request.engine = None
            return [Abort(engine, request.id, request.epoch), *self._resume(request)]
        request.replays += 1
        request.replay_at = now + self.config.replay_s
        return [Replay(engine, request.id, len(request.output))]

    def _accept(self, request: Tracked, output: Output, now: float) -> list[Effect]:
        if "token" not in output:
            return []
        if request.silent_since is not None:
            self.downtimes.append((request.id, request.epoch, now - request.silent_since))
            request.silent_since = None
        request.output.append(output["token"])
        request.token_at = now
        request.replay_at, request.replays = 0.0, 0
        request.waiting_since, request.retry_s = None, 0.0
        request.refused_by.clear()  # long ago, when it is next looked for an engine
        if is_terminal(output):
            del self.requests[request.id]
        return [Emit(request.id, output)]

    def _refused(self, request: Tracked, engine: str, output: Output, now: float) -> list[Effect]:
        error = output["error"]
        request.engine = None
        if error in (QUEUE_FULL, DRAINING):  # it was never accepted there: this is no resume
            request.refused_by.add(engine)
            request.full = error == QUEUE_FULL
            return self._submit_anew(request)
        if error in RETRY_ELSEWHERE:
            if error in (DRAINED, FAILED):
                request.refused_by.add(engine)
            if error == MOVE_FAILED:  # no engine died: this is no resume
                request.home = engine
                return self._submit_anew(request)
            return self._resume(request, died=error != DRAINED)
        return self._end(request, error, output.get("message", ""))

    def _resume(self, request: Tracked, died: bool = True) -> list[Effect]:
        """Start a request again from its tokens. Only what died may be the request's own doing, and counts for it."""
        if self.closes_at is not None:
            return self._end_closing(request)
        if died and request.resumes >= self.config.max_resumes:
            return self._end(
                request, ENGINE_LOST, f"the request was started {request.resumes + 1} times and its replica died"
            )
        request.resumes += died
        request.waiting_since, request.retry_s = None, 0.0  # an engine had taken it
        self.resumed += 1
        return self._submit_anew(request)

    def _submit_anew(self, request: Tracked) -> list[Effect]:
        """Every submission has an epoch of its own, so that nothing late of an earlier one is taken for its."""
        request.epoch = (request.epoch[0] + 1, request.epoch[1])
        return self._dispatch(request)

    def _dispatch(self, request: Tracked) -> list[Effect]:
        if self.closes_at is not None:
            return self._end_closing(request)
        home, request.home = request.home, None
        return [Dispatch(request.id, frozenset(request.refused_by), home)]

    def _end_closing(self, request: Tracked) -> list[Effect]:
        return self._end(request, CLOSING, "the service is shutting down")

    def _end(self, request: Tracked, error: str, message: str) -> list[Effect]:
        del self.requests[request.id]
        output = {"id": request.id, "epoch": list(request.epoch), "index": len(request.output)}
        return [Emit(request.id, {**output, "error": error, "message": message})]
