"""Simulated engines under the live policies: dispatch, pairing, choice, mechanism and scaling, event to event."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from llumnix.load import DRAINING, READY, STARTING, LoadReport, freeness
from llumnix.policies import choice, dispatch, pairing, scaling
from llumnix.policies.fleet import Fleet
from llumnix.settings import LlumnixSettings
from llumnix.simulator.device import Device
from llumnix.simulator.engine import Engine
from llumnix.simulator.move import Move
from llumnix.simulator.request import NEVER, Request
from llumnix.simulator.result import Sample
from llumnix.simulator.trace import Trace


@dataclass(frozen=True)
class ClusterConfig:
    """What is simulated, besides the trace."""

    device: Device
    settings: LlumnixSettings
    replicas: int = 16
    moves: bool = True  # false: none at all, draining engines finish what they have
    classes: bool = True  # false: engines and policies are blind to priorities
    autoscale: tuple[int, int] | None = None  # least and most replicas
    report_s: float = 0.1  # between load reports of one engine, as the dispatcher sees them
    booking: bool = True  # the dispatcher counts at once what it has sent
    sample_s: float = 5.0  # between samples of the time series


class Cluster:
    """Runs one trace to its end. Everything that happens is an event (time, number, call, argument) on one heap."""

    def __init__(self, config: ClusterConfig, trace: Trace):
        self.config = config
        self.device = config.device
        self.settings = config.settings
        self.now = 0.0
        self.engines: dict[str, Engine] = {}
        self.fleet = Fleet()
        self.requests = [
            Request(i, float(trace.arrival[i]), int(trace.prompt[i]), int(trace.output[i]), int(trace.priority[i]))
            for i in range(len(trace))
        ]
        self.unfinished = len(self.requests)
        self.dispatched = 0
        self.busy: Counter[str] = Counter()  # moves under way by engine
        self.outcomes: dict[tuple[str, str], int] = defaultdict(int)  # (cause, outcome) -> moves
        self.samples: list[Sample] = []
        self.preemptions = 0
        self.replica_seconds = 0.0
        self._counted = 0.0  # until when replica_seconds is counted
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._numbers = 0
        self._names = 0
        self._scaling = scaling.ScalingState()
        self._quickest = config.device.step_base_s or config.device.step_request_s or 1e-4

    def run(self) -> None:
        for _ in range(self.config.replicas):
            self._add_engine(READY)
        for request in self.requests:
            self.at(request.arrival, self._arrive, request)
        self.at(0.0, self._pair, None)
        self.at(0.0, self._sample, None)
        if self.config.autoscale is not None:
            self.at(self.settings.scale_interval_s, self._scale, None)
        events = self._events
        while self.unfinished:
            self.now, _, call, argument = heapq.heappop(events)
            call(argument)
        self._count_replicas()

    def at(self, time: float, call: Callable[..., None], argument: object) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (time, self._numbers, call, argument))

    # -- engines ------------------------------------------------------------------------------------------------

    def touch(self, engine: Engine) -> None:
        """An engine's next boundary may have changed."""
        if engine.next < NEVER:
            self.at(engine.next, self._fire, (engine, engine.next))

    def _fire(self, what: tuple[Engine, float]) -> None:
        engine, time = what
        if engine.next != time:
            return  # the run was shortened, or something began at once
        engine.fire(self.now)
        self.unfinished -= len(engine.finished)
        engine.finished.clear()
        self.touch(engine)
        if engine.state == DRAINING and engine.empty:
            self._remove(engine)

    def _add_engine(self, state: str) -> Engine:
        self._count_replicas()
        self._names += 1
        engine = Engine(f"e{self._names:04}", self.device, self.config.classes)
        engine.state = state
        engine.report_due = self.now + self.config.report_s * (self._names * 0.618 % 1)
        self.engines[engine.name] = engine
        self.fleet.put(engine.report(self.now))
        return engine

    def _remove(self, engine: Engine) -> None:
        self._count_replicas()
        self.preemptions += engine.preemptions
        engine.preemptions = 0
        if self.engines.pop(engine.name, None) is not None:
            self.fleet.remove(engine.name)

    def _count_replicas(self) -> None:
        self.replica_seconds += len(self.engines) * (self.now - self._counted)
        self._counted = self.now

    # -- dispatch -----------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        self._take_reports()
        priority = request.priority if self.config.classes else 0
        name = dispatch.choose(self.fleet, dispatch.Ask(request.prompt, priority), self.settings, self.dispatched)
        if name is None:  # no engine is ready
            self.at(self.now + 1.0, self._arrive, request)
            return
        self.dispatched += 1
        engine = self.engines[name]
        if self.config.booking:
            self._book(engine, -(-request.prompt // engine.size), request.prompt, 1)
        engine.add(request, self.now)
        self.touch(engine)

    def _take_reports(self) -> None:
        """What has been reported by now. Engines report in turn, each after report_s."""
        for engine in self.engines.values():
            if self.now < engine.report_due:
                continue
            if engine.booked[2]:
                self._book(engine, *(-number for number in engine.booked))
            self.fleet.put(engine.report(self.now))
            period = self.config.report_s
            if period > 0:
                engine.report_due += period * ((self.now - engine.report_due) // period + 1)

    def _book(self, engine: Engine, blocks: int, tokens: int, requests: int) -> None:
        self.fleet.book(engine.name, blocks, tokens, requests)
        engine.booked = (engine.booked[0] + blocks, engine.booked[1] + tokens, engine.booked[2] + requests)

    # -- moves --------------------------------------------------------------------------------------------------

    def _pair(self, _: object) -> None:
        self.at(self.now + self.settings.pairing_interval_s, self._pair, None)
        if not self.config.moves:
            return
        reports = [self._report(engine) for engine in self.engines.values() if self._may_give(engine)]
        sources = {report.engine for report in reports if report.movable}
        if not sources:
            return
        others = [e.report(self.now) for e in self.engines.values() if e.name not in sources and not e.waiting]
        reports = [report for report in reports if report.movable] + others
        for made in pairing.pair(reports, self.settings, self.busy):
            source, destination = self.engines[made.source], self.engines[made.destination]
            found = choice.choose(source.movable(self.now), made.max_blocks, self.settings, self.now, made.cause)
            if found is not None:
                Move(self, self.requests[int(found.id)], source, destination, made.cause).start()

    def _may_give(self, engine: Engine) -> bool:
        """Cheap: whether this engine can be a source now. F falls by one a step, so a free engine stays free."""
        if engine.state == DRAINING:
            return True
        return engine.state == READY and self.settings.enable_moves and self.now >= engine.quiet_until

    def _report(self, engine: Engine) -> LoadReport:
        """The report of an engine that may give: movable requests are listed only where they could be wanted."""
        report = engine.report(self.now)
        if engine.state == DRAINING:
            listed = choice.listed(engine.movable(self.now), self.settings, self.now, choice.DRAIN)
            return engine.report(self.now, listed)
        spare = freeness(report, self.settings) - self.settings.out_steps(report.capacity)
        if spare >= 0:
            engine.quiet_until = self.now + spare * self._quickest
            return report
        return engine.report(self.now, choice.listed(engine.movable(self.now), self.settings, self.now))

    # -- scaling ------------------------------------------------------------------------------------------------

    def _scale(self, _: object) -> None:
        self.at(self.now + self.settings.scale_interval_s, self._scale, None)
        low, high = self.config.autoscale or (1, 1)
        reports = [engine.report(self.now) for engine in self.engines.values()]
        staying = sum(report.state != DRAINING for report in reports)
        average = scaling.average_share(reports, self.settings)
        wanted, self._scaling = scaling.desired_replicas(
            average, staying, self._scaling, self.now, self.settings, low, high
        )
        for _ in range(wanted - staying):
            self._grow()
        for _ in range(staying - wanted):
            self._shrink(reports)

    def _grow(self) -> None:
        """A draining engine stays after all, or a new one starts."""
        draining = [engine for engine in self.engines.values() if engine.state == DRAINING]
        if draining:
            stays = max(draining, key=lambda engine: engine.batch)
            self._ready(stays)
        else:
            self.at(self.now + self.device.startup_s, self._ready, self._add_engine(STARTING))

    def _ready(self, engine: Engine) -> None:
        engine.state = READY
        engine.report_due = self.now

    def _shrink(self, reports: list[LoadReport]) -> None:
        name = scaling.victim(reports)
        if name is None:
            return
        engine = self.engines[name]
        engine.state = DRAINING
        engine.quiet_until = 0.0
        self.fleet.put(engine.report(self.now))
        if engine.empty:
            self._remove(engine)

    # -- samples ------------------------------------------------------------------------------------------------

    def _sample(self, _: object) -> None:
        self.at(self.now + self.config.sample_s, self._sample, None)
        engines = list(self.engines.values())
        free = [engine.free_blocks(self.now) for engine in engines]
        total = sum(engine.total for engine in engines)
        self.samples.append(
            Sample(
                time=self.now,
                replicas=len(engines),
                running=sum(engine.batch for engine in engines),
                waiting=sum(len(engine.waiting) for engine in engines),
                used_share=1 - sum(free) / total,
                fragmented_share=_fragmented(sum(free), [e.head_blocks for e in engines if e.head_blocks]) / total,
                preemptions=self.preemptions + sum(engine.preemptions for engine in engines),
            )
        )


def _fragmented(free: int, heads: list[int]) -> int:
    """Blocks that are free in the cluster and would let the heads of blocked queues in, were they on one engine."""
    wasted = 0
    for blocks in sorted(heads):
        if wasted + blocks > free:
            break
        wasted += blocks
    return wasted
