"""An ingress's connection to the engines: carries out what the tracker decides.

Follows the manager's view, keeps one token stream and one lease per engine, chooses an engine for every request from
its cached view and books it there at once. Never waits for the manager: when that is down, the streams that are open
are the view.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import ActorDiedError, RayError

from engine.config import EngineConfig
from llumnix.load import READY, STARTING, LoadReport
from llumnix.settings import LlumnixSettings
from serving import clock
from serving.dispatch import Dispatcher
from serving.messages import UNKNOWN, Output, error_output, is_terminal
from serving.tracker import Abort, Dispatch, Effect, Emit, Replay, Send, Tracker, TrackerConfig
from serving.waking import Waking

logger = logging.getLogger("ferry.ingress")

BACKPRESSURE_ITEMS = 16
TICK_S = 0.05
RENEW_S = 1.0  # at most a quarter of a lease
IDLE_RENEW_S = 10.0  # for an engine without requests of this ingress
VIEW_TIMEOUT_S = 5.0
VIEW_RETRY_S = 0.3
CLOSE_MARGIN_S = 0.3  # engines end their requests first
UNREAD_S = 3.0  # an engine's outputs that have waited this long say that its stream is lost
CUT_RETRY_S = 2.0  # when an engine whose stream was cut may be tried again
STRANDED_S = 0.5  # between looks at why no engine takes a request


@dataclass
class Link:
    """One engine as this ingress knows it."""

    id: str
    actor: Any
    report: LoadReport
    task: asyncio.Task[None] | None = None
    renewed: float = 0.0  # when its lease was last renewed
    unanswered_since: float | None = None  # the first renewal without an answer


async def _never() -> bool:
    return False


class EngineClient:
    """`generate` is the whole interface for the text side.

    `going` says whether the whole application is being deleted; `wake` returns once there is an engine again, and is
    None where at least one always is.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: Any,
        going: Callable[[], Awaitable[bool]] = _never,
        wake: Callable[[], Awaitable[Any]] | None = None,
    ):
        self.config = config
        self.manager = manager
        self.going = going
        self.waking = Waking(wake, lambda: self.ready, config.max_num_queued, config.max_queue_time) if wake else None
        self.name = f"ingress-{os.urandom(6).hex()}"
        self.tracker = Tracker(self.name, _tracker_config(config, wake is not None))
        self.links: dict[str, Link] = {}
        self.dispatcher = Dispatcher(config.block_size, config.enable_prefix_caching, config.step_timeout_s)
        self.settings_version = -1  # of the manager's settings; -1: not heard yet
        self.starting: dict[str, str] = {}  # engines that are not ready yet -> phase
        self.avoid: dict[str, float] = {}  # lost engines -> when they may be tried again (inf: dead)
        self._queues: dict[str, asyncio.Queue[Output]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Begin to follow the cluster; to be called on the running loop."""
        for loop in (self._follow_manager(), self._tick(), self._renew(), self._look_after_stranded()):
            self._spawn(loop)

    # -- for the text side --------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """At least one engine takes requests and finishes its steps."""
        if self.tracker.closes_at is not None:
            return False
        return self.dispatcher.ready

    @property
    def phase(self) -> str:
        """What the engines are doing while none is ready."""
        if self.tracker.closes_at is not None:
            return "shutting down"
        return "; ".join(sorted(set(self.starting.values()))) or "waiting for a replica"

    @property
    def max_model_len(self) -> int | None:
        """Tokens the longest sequence may have on any ready engine; None before the first is ready."""
        return self.dispatcher.max_model_len

    async def generate(
        self, request_id: str, prompt: list[int], params: dict[str, Any], priority: int = 0
    ) -> AsyncGenerator[list[Output], None]:
        """The outputs of one sequence, all that have come at a time; the last one of the last list is terminal.

        Closing the iterator aborts the request. Use it under contextlib.aclosing.
        """
        queue: asyncio.Queue[Output] = asyncio.Queue()
        self._queues[request_id] = queue
        deadline = clock.now() + self.config.request_timeout_s
        try:
            self._carry_out(self.tracker.start(request_id, prompt, params, priority, deadline))
            while True:
                outputs = [await queue.get()]
                while not queue.empty():
                    outputs.append(queue.get_nowait())
                yield outputs
                if is_terminal(outputs[-1]):
                    return
        finally:
            del self._queues[request_id]
            self._carry_out(self.tracker.cancel(request_id))

    async def drain_engines(self, deadline_s: float) -> None:
        """Ask every engine to end its requests within deadline_s: the application is going away. Whatever happens to
        an engine meanwhile, every request of this ingress has its end a moment later; other ingresses learn from their
        outputs that no other engine will come."""
        self._close(clock.now() + deadline_s + CLOSE_MARGIN_S)
        calls = [asyncio.ensure_future(link.actor.drain.remote(deadline_s, True)) for link in self.links.values()]
        if calls:
            await asyncio.wait(calls, timeout=deadline_s + 2 * CLOSE_MARGIN_S)

    def _close(self, until: float) -> None:
        self._carry_out(self.tracker.close(until))
        if self.waking is not None:
            self.waking.give_up("the service is shutting down")

    @property
    def may_wake(self) -> bool:
        """A request that comes now is held until an engine runs."""
        return self.waking is not None and self.tracker.closes_at is None

    async def wait_ready(self) -> str:
        """Returns why no engine takes requests, or nothing when one does; where engines may be started for requests,
        waits for that."""
        if self.ready:
            return ""
        if self.waking is None or not self.may_wake:
            return f"no replica is ready: {self.phase}"
        return await self.waking.hold()

    # -- effects ------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        """Never raises: the tracker counts on every effect, and one that fails must not take others' tokens along."""
        todo = list(effects)
        while todo:
            effect = todo.pop(0)
            try:
                todo += self._perform(effect)
            except Exception:
                logger.exception("an effect failed: %s", type(effect).__name__)
                if isinstance(effect, Dispatch):  # the request tries again, for a bounded time
                    todo += self.tracker.unassigned(effect.id, clock.now())

    def _perform(self, effect: Effect) -> list[Effect]:
        """Carry out one effect; returns those that follow from it."""
        match effect:
            case Emit(id=request_id, output=output):
                queue = self._queues.get(request_id)
                if queue is not None:
                    queue.put_nowait(output)
            case Dispatch():
                return self._dispatch(effect)
            case Send(engine=engine, message=message):
                self._spawn(self._send(engine, message))
            case Abort(engine=engine, id=request_id, epoch=epoch):
                if engine in self.links:
                    self.links[engine].actor.abort.remote(self.name, [(request_id, list(epoch))])
            case Replay(engine=engine, id=request_id, start=start):
                self._spawn(self._replay(engine, request_id, start))
        return []

    def _dispatch(self, effect: Dispatch) -> list[Effect]:
        now = clock.now()
        request = self.tracker.requests.get(effect.id)
        if request is None:
            return []
        home = self.links.get(effect.prefer or "")
        if home is not None and (home.report.state != READY or home.id in effect.exclude or home.report.waiting):
            home = None
        silent = self._silent(now)
        if home is not None and home.id in silent:
            home = None
        engine = None
        for exclude in (effect.exclude | silent, effect.exclude) if silent else (effect.exclude,):
            engine = self.dispatcher.choose(
                request.prompt, request.output, request.priority, exclude, now, home.id if home else None
            )
            if engine is not None:
                break
        if engine is None:
            return self.tracker.unassigned(effect.id, now)
        return self.tracker.assigned(effect.id, engine, now)

    def _silent(self, now: float) -> frozenset[str]:
        """Engines that have not answered for a while: their last report may still look good, but nothing new goes
        there as long as others answer."""
        limit = self.config.lease_s / 2
        since = {link.id: link.unanswered_since for link in self.links.values()}
        return frozenset(name for name, when in since.items() if when is not None and now - when > limit)

    async def _send(self, engine: str, message: dict[str, Any]) -> None:
        try:
            link = self.links[engine]
            await link.actor.add.remote(message)
        except Exception as error:
            logger.debug("request %s did not reach engine %s: %s", message["id"], engine, type(error).__name__)
            self._carry_out(self.tracker.send_failed(engine, message["id"], tuple(message["epoch"]), clock.now()))

    async def _replay(self, engine: str, request_id: str, start: int) -> None:
        try:
            outputs = await self.links[engine].actor.replay.remote(self.name, {request_id: start})
        except Exception:
            return  # the broken stream tells the rest, and the gap is asked for again
        request = self.tracker.requests.get(request_id)
        if not outputs and request is not None and request.engine == engine:
            outputs = [error_output(request_id, request.epoch, UNKNOWN)]
        self._carry_out(self.tracker.outputs(engine, outputs, clock.now()))

    # -- engines ------------------------------------------------------------------------------------------------

    async def _follow_manager(self) -> None:
        version: Any = None
        while True:
            try:
                call = self.manager.view.remote(version, list(self.links), self.settings_version)
                view = await asyncio.wait_for(call, VIEW_TIMEOUT_S)
            except Exception as error:  # the manager is down or restarting: go on with what is known
                logger.debug("no view from the manager: %s", type(error).__name__)
                version = None
                await asyncio.sleep(VIEW_RETRY_S)
                continue
            try:
                self._merge(view["engines"], view.get("names", list(view["engines"])))
                if "settings" in view:
                    self.dispatcher.settings = LlumnixSettings.of_message(view["settings"])
                    self.settings_version = view["settings_version"]
                version = view["version"]
            except Exception:
                logger.exception("the manager's view cannot be used")
                version = None
                await asyncio.sleep(VIEW_RETRY_S)

    def _merge(self, engines: dict[str, dict[str, Any]], names: list[str] | None) -> None:
        """Take over what has changed in the view; `names` of all engines when one came or went. An engine whose stream
        is open stays even if the manager does not list it: the stream is the better proof of life, and a manager that
        has just restarted knows nobody yet."""
        now = clock.now()
        if names is not None:
            listed = set(names)
            self.starting = {name: phase for name, phase in self.starting.items() if name in listed}
            self.avoid = {name: when for name, when in self.avoid.items() if name in listed}
        for name, entry in engines.items():
            message = entry["report"]
            link = self.links.get(name)
            if link is not None:
                if (message["incarnation"], message["sequence"]) > (link.report.incarnation, link.report.sequence):
                    link.report = LoadReport.from_message(message)
                    self.dispatcher.put(link.report, now)
                continue
            report = LoadReport.from_message(message)
            self.starting.pop(name, None)
            if report.state == STARTING:
                self.starting[name] = report.phase
            elif self.avoid.get(name, 0.0) <= now and entry["actor"] is not None:  # else: lost since it was asked for
                self.avoid.pop(name, None)
                link = self.links[name] = Link(name, entry["actor"], report)
                self.dispatcher.put(report, now)
                self._open(link)

    def _open(self, link: Link) -> None:
        if link.task is not None:
            link.task.cancel()
        link.task = self._spawn(self._read(link))

    async def _read(self, link: Link) -> None:
        """The token stream of one engine, opened again by cursor when it ends."""
        failures = 0
        while True:
            try:
                stream = link.actor.stream.options(
                    num_returns="streaming", _generator_backpressure_num_objects=BACKPRESSURE_ITEMS
                ).remote(self.name, self.tracker.cursors(link.id))
                async for reference in stream:
                    item = await reference
                    failures = 0
                    self._carry_out(self.tracker.outputs(link.id, item["outputs"], clock.now()))
            except ActorDiedError:
                self._lose(link, forever=True)
                return
            except Exception as error:  # whatever it is, a stream that is not read starves its requests
                failures += 1
                logger.warning("stream of engine %s broke: %s", link.id, type(error).__name__, exc_info=_ours(error))
                if failures > 2:
                    self._lose(link)
                    return
                await asyncio.sleep(0.2)

    def _lose(self, link: Link, forever: bool = False) -> None:
        if self.links.get(link.id) is not link:
            return
        del self.links[link.id]
        self.dispatcher.remove(link.id)
        now = clock.now()
        self.avoid[link.id] = float("inf") if forever else now + CUT_RETRY_S
        owned = len(self.tracker.cursors(link.id))
        if owned:
            logger.warning("engine %s is lost with %d requests of this ingress; they resume elsewhere", link.id, owned)
        else:
            logger.info("engine %s has gone", link.id)
        self._carry_out(self.tracker.engine_lost(link.id, now))
        if link.task is not None and link.task is not asyncio.current_task():
            link.task.cancel()

    async def _renew(self) -> None:
        """Keep the leases, and give up engines that have not answered for two leases."""
        period = min(RENEW_S, self.config.lease_s / 4)
        while True:
            started = clock.now()
            try:
                self._renew_all(started)
            except Exception:
                logger.exception("the leases were not renewed")
            await asyncio.sleep(period)
            late = clock.now() - started - period
            if late > min(1.0, self.config.lease_s):  # this process was stopped: the silence was ours
                logger.warning("this ingress was stopped for %.1f s", late)
                for link in self.links.values():
                    link.unanswered_since = None

    def _renew_all(self, now: float) -> None:
        for link in list(self.links.values()):
            if link.unanswered_since is not None and now - link.unanswered_since > 2 * self.config.lease_s:
                self._lose(link)
            elif now - link.renewed >= IDLE_RENEW_S or self.tracker.cursors(link.id):
                self._spawn(self._renew_one(link, now))

    async def _renew_one(self, link: Link, now: float) -> None:
        link.renewed = now
        if link.unanswered_since is None:
            link.unanswered_since = now
        try:
            cursors, epochs = self.tracker.cursors(link.id), self.tracker.epochs(link.id)
            answer = await link.actor.renew.remote(self.name, cursors, epochs)
            link.unanswered_since = None
            untaken_s = answer.get("untaken_s", 0.0) if answer else 0.0  # older engines say nothing
            if untaken_s > UNREAD_S and self.links.get(link.id) is link:
                logger.warning("stream of engine %s is silent; it is opened again", link.id)
                self._open(link)
        except Exception as error:  # the stream tells
            logger.debug("no answer to a renewal from engine %s: %s", link.id, type(error).__name__)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                for engine in self.tracker.owners() - self.links.keys():  # a request moved to an engine that is lost
                    self._carry_out(self.tracker.engine_lost(engine, clock.now()))
                self._carry_out(self.tracker.tick(clock.now()))
            except Exception:
                logger.exception("a tick failed")

    async def _look_after_stranded(self) -> None:
        """Requests that no engine takes: when the application is going away they end at once, and when there is no
        engine because none was needed, one is started."""
        while True:
            await asyncio.sleep(STRANDED_S)
            try:
                stranded = self.tracker.stranded and not self.ready
                if self.waking is not None:
                    self.waking.need(stranded)
                    stranded = stranded or self.waking.held > 0
                if stranded and await self.going():
                    self._close(float("inf"))
            except Exception:
                logger.exception("stranded requests were not looked after")

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task failed", exc_info=task.exception())


def _ours(error: Exception) -> Exception | None:
    """An error whose place in our code is worth a traceback; those of Ray tell of other processes."""
    return None if isinstance(error, RayError) else error


def _tracker_config(config: EngineConfig, may_sleep: bool) -> TrackerConfig:
    """A request that is there while no engine is may have to wait for one to start."""
    made = TrackerConfig(max_resumes=config.max_resumes)
    return replace(made, no_engine_s=max(made.no_engine_s, config.max_queue_time)) if may_sleep else made
