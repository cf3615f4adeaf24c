"""One engine as others reach it: the asyncio loop does RPC, the engine thread steps. Knows nothing of Ray.

One stream per ingress carries the tokens of all that ingress's requests, one item a step. A stream that is read slowly
blocks (bounded by Ray's generator backpressure) and what gathers meanwhile goes into one item. Streams end after
RENEW_ITEMS items and are opened again by cursor, because every item leaves a few bytes behind in both processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.event import Event
from engine.host import Share, give_way
from engine.request import Status
from engine.sampling.params import SamplingParams
from engine.scheduler import QueueFull
from engine.verification import sampled
from llumnix.load import DRAINING, MIXED, PREFILL, READY, STARTING, SUMMARY_BYTES, Movable, summarise
from llumnix.policies.choice import BALANCE, DRAIN, HANDOVER, listed, passed_over
from llumnix.policies.choice import PREFILL as PREFILLING
from llumnix.policies.dispatch import CACHE_AWARE
from llumnix.policies.scaling import average_share
from llumnix.settings import DEFAULTS, LlumnixSettings
from serving import clock
from serving.drain import Drain
from serving.engine_metrics import EngineMetrics
from serving.engine_thread import EngineThread
from serving.kv_memory import KVMemory
from serving.load_report import load_report
from serving.logs import configure_logging
from serving.messages import DRAINING as ERROR_DRAINING
from serving.messages import (
    FAILED,
    INVALID,
    PROTOCOL_VERSION,
    QUEUE_FULL,
    UNKNOWN,
    Output,
    error_output,
    output_of,
)
from serving.move_command import MoveCommands, in_prefill, movable
from serving.move_destination import MoveDestination
from serving.move_source import MoveSource
from serving.outbox import Outboxes
from serving.reporting import Reporter

logger = logging.getLogger("ferry.engine_actor")

RENEW_ITEMS = 10_000


class EngineNode:
    """`engine_id` names the replica; `manager` is a Serve handle, or None without a cluster view; `share` is what the
    engine has of its host."""

    def __init__(self, config: dict[str, Any], engine_id: str, manager: Any = None, share: Share | None = None):
        self.config = EngineConfig(**config)
        self.share = share or Share(self.config.most_replicas)
        configure_logging(self.config.log_level)
        self.id = engine_id
        self.state = STARTING
        self.phase = "starting the process"
        self.incarnation = time.time()
        self.outboxes = Outboxes(self.config.lease_s)
        self.wakeups: dict[str, asyncio.Event] = {}  # of the newest stream of each ingress; older ones end
        self.metrics = EngineMetrics(engine_id)
        self.compat_key = ""
        self.max_model_len = 0
        self.failed = ""
        self.tasks: set[asyncio.Task[Any]] = set()
        self.reporter = Reporter(manager, self._report, self._on_answer)
        self.role = MIXED
        self.settings = DEFAULTS
        self.settings_version = -1  # of the manager's settings; -1: not heard yet
        self.movable: tuple[Movable, ...] = ()
        self.staying: Counter[str] = Counter()  # requests that would not move now, by reason
        self.prefix = ""
        self.thread = EngineThread(self._build, self._on_events, self._on_failure, self._on_look)
        self.copy: Callable[[Callable[[], Any]], Awaitable[Any]] = asyncio.to_thread
        self.drains = Drain(self)
        self.giving = MoveSource(self)
        self.commands = MoveCommands(self, self.giving)
        self.taking = MoveDestination(self)

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Load the model; returns once the engine can step. Raises ValueError with a one-line message."""
        self.loop = asyncio.get_running_loop()
        self.spawn(self.reporter.run())
        self.spawn(self._keep_leases())
        self.thread.start()
        try:
            engine = await asyncio.wrap_future(self.thread.ready)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.debug("start-up failed", exc_info=error)
            raise ValueError(f"the engine cannot start: {reason}") from None
        self.engine = engine
        self.compat_key, self.max_model_len = engine.compat_key, engine.scheduler.max_length
        self.block_bytes = engine.executor.read_blocks([0])[0].nbytes
        self.memory = KVMemory(self.id, engine.executor, self.block_bytes)
        self._apply_settings()
        self.state, self.phase = READY, ""
        self.reporter.changed(urgent=True)
        return {"pid": os.getpid(), "engine": self.id, "max_model_len": self.max_model_len}

    def _build(self) -> Engine:
        from engine.build import build_engine  # torch is imported here, on the engine's thread

        give_way()
        return build_engine(self.config, self._on_phase, pin_cores=True, share=self.share)

    def _on_phase(self, phase: str) -> None:
        self.phase = phase
        self.loop.call_soon_threadsafe(self.reporter.changed)

    async def ping(self) -> dict[str, Any]:
        """For health checks and autoscaling: raises when the engine failed or a step takes longer than step_timeout_s.

        free_share: freeness without headroom as a share of capacity, in [0, 1].
        """
        if self.failed:
            raise RuntimeError(f"the engine failed: {self.failed}")
        stalled = self.thread.stalled_s()
        if stalled > self.config.step_timeout_s:
            raise RuntimeError(f"a step has taken {stalled:.0f} s, step_timeout_s is {self.config.step_timeout_s:g}")
        report = load_report(self, 0)
        return {
            "state": self.state,
            "free_share": average_share([report]) or 0.0,
            "running": report.running,
            "waiting": report.waiting,
        }

    async def until_death(self) -> None:
        """Never answers; whoever waits for it hears of this process's death at once."""
        await asyncio.Event().wait()

    async def drain(self, deadline_s: float, closing: bool = False) -> dict[str, Any]:
        """Take nothing new, give away what others take, let the rest run for deadline_s, then end it: with a
        retryable error, unless the whole application is `closing` and there is nowhere to try again.

        A later call with a shorter deadline shortens the wait. Returns what became of the requests that were here:
        {"engine", "moved", "resumed" (ended early, for their ingress to start elsewhere), "finished", "seconds"}.
        """
        return await self.drains.run(deadline_s, closing)

    # -- requests -----------------------------------------------------------------------------------------------

    async def add(self, message: dict[str, Any]) -> None:
        """Submit a request (see serving.tracker.Send). Whatever comes of it comes through the stream."""
        name, request_id, epoch = message["client"], message["id"], message["epoch"]
        if not self.outboxes.opened(name, request_id, epoch, clock.now()):
            return
        if self.state != READY:
            self.deliver({name: [self.drains.refusal(request_id, epoch, ERROR_DRAINING)]})
            return
        self.thread.post(partial(self._add, message))

    async def abort(self, client: str, requests: list[tuple[str, list[int]]]) -> None:
        """Drop requests, each with the epoch up to which it is unwanted; blocks are free before the next step."""
        for request_id, epoch in requests:
            known = self.outboxes.clients.get(client)
            if known is None or known.open.get(request_id, epoch) <= epoch:
                self.outboxes.closed(client, request_id, clock.now())
            self.thread.post(partial(self._abort, request_id, epoch))

    async def renew(
        self, client: str, cursors: dict[str, int], epochs: dict[str, list[int]] | None = None
    ) -> dict[str, Any]:
        """An ingress is alive and has tokens up to these cursors; what it waits for in vain, under the epochs it knows,
        is told in its stream.

        The answer says for how long nobody has taken its outputs: a stream may be lost without a word to either end.
        """
        now = clock.now()
        for request_id in self.outboxes.acknowledge(client, cursors, now, epochs):
            lost = error_output(request_id, [2**31, 0], UNKNOWN)
            self.outboxes.clients[client].queue(lost, now)
            self.wake(client)
        return {"v": PROTOCOL_VERSION, "untaken_s": self.outboxes.untaken_s(client, now)}

    async def replay(self, client: str, cursors: dict[str, int]) -> list[Output]:
        """Outputs of requests from the given indices on."""
        return self.outboxes.replay(client, cursors, clock.now())

    async def stream(self, client: str, cursors: dict[str, int]) -> AsyncIterator[dict[str, Any]]:
        """The outputs of all of an ingress's requests, from the cursors on; ends with "renew" or when replaced."""
        self.wake(client)
        event = self.wakeups[client] = asyncio.Event()
        first = self.outboxes.replay(client, cursors, clock.now())
        yield self._item(first)
        for count in range(RENEW_ITEMS):
            while self._streaming(client, event) and not self.outboxes.clients[client].pending:
                await event.wait()
                event.clear()
            if not self._streaming(client, event):
                return
            yield self._item(self.outboxes.take(client), renew=count == RENEW_ITEMS - 1)

    def _streaming(self, client: str, event: asyncio.Event) -> bool:
        """A stream goes on while its ingress is known and has not opened another one."""
        return self.wakeups.get(client) is event and client in self.outboxes.clients

    # -- moves: messages in serving.move_source, which is who calls these at another engine -----------------------

    async def migrate(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Give requests to another engine, as the manager or an operator says; returns what became of each."""
        return await self.commands.give(command)

    async def reserve(self, message: dict[str, Any]) -> dict[str, Any]:
        return await self.taking.reserve(message)

    async def write(self, message: dict[str, Any]) -> dict[str, Any]:
        return await self.taking.write(message)

    async def commit(self, message: dict[str, Any]) -> dict[str, Any]:
        return await self.taking.commit(message)

    async def release(self, key: str) -> None:
        await self.taking.release(key)

    # -- numbers ------------------------------------------------------------------------------------------------

    async def snapshot(self) -> dict[str, Any]:
        """Every request here, for /cluster and tests."""
        requests = await self.thread.call(self._requests)
        return {"id": self.id, "state": self.state, "pid": os.getpid(), "requests": requests}

    # -- on the engine thread -----------------------------------------------------------------------------------

    def _add(self, message: dict[str, Any]) -> None:
        request_id, epoch = message["id"], message["epoch"]
        try:
            here = self.engine.scheduler.requests.get(request_id)
            if here is not None and here.epoch < tuple(epoch):
                self.engine.abort(request_id)  # a resume finds its older self: it goes on from the same blocks
            self.engine.add_request(
                request_id,
                message["prompt"],
                SamplingParams.from_dict(message["params"]),
                client=message["client"],
                priority=message.get("priority", 0),
                epoch=(epoch[0], epoch[1]),
                output=message.get("output", ()),
            )
        except QueueFull as error:
            self._refuse(message, QUEUE_FULL, str(error))
        except (ValueError, TypeError, KeyError) as error:
            self._refuse(message, INVALID, str(error))
        except Exception as error:  # ours: unanswered, the request would hang
            logger.exception("request %s could not be queued", request_id)
            self._refuse(message, FAILED, type(error).__name__)

    def _refuse(self, message: dict[str, Any], kind: str, reason: str) -> None:
        output = error_output(message["id"], message["epoch"], kind, reason)
        self.loop.call_soon_threadsafe(self.deliver, {message["client"]: [output]})

    def _abort(self, request_id: str, epoch: list[int]) -> None:
        self.engine.abort(request_id, (epoch[0], epoch[1]))

    def _requests(self) -> list[dict[str, Any]]:
        scheduler = self.engine.scheduler
        return [
            {
                "id": r.id,
                "status": Status.HELD.value if r.id in self.giving.moves else r.status.value,
                "priority": r.priority,
                "tokens": len(r.tokens),
                "blocks": len(r.blocks),
                "client": r.client,
                "epoch": list(r.epoch),
            }
            for r in (*scheduler.running, *scheduler.waiting)
        ]

    def _on_events(self, events: list[Event]) -> None:
        by_client: dict[str, list[Output]] = defaultdict(list)
        for event in events:
            by_client[event.request.client].append(output_of(event))
            self._verify(event)
        self.loop.call_soon_threadsafe(self.deliver, by_client)

    def _verify(self, event: Event) -> None:
        """Have a sample of what moved or was resumed run again when there is nothing else to do."""
        request = event.request
        if event.finish_reason is None or request.epoch == (0, 0) or not self.engine.reproducible:
            return
        if sampled(request.id, self.settings.verify_moves):
            self.engine.verifier.offer(request)

    def _on_look(self, engine: Engine) -> None:
        """What a load report says beside the stats."""
        candidates = movable(engine, all_of_them=self.state == DRAINING)
        cause = DRAIN if self.state == DRAINING else HANDOVER if self.role == PREFILL else BALANCE
        self.movable = listed(candidates, self.settings, engine.clock(), cause)
        self.staying = passed_over(candidates, engine.scheduler.pool.total, self.settings, engine.clock(), cause)
        self.staying[PREFILLING] += in_prefill(engine) if self.state != DRAINING else 0
        looks = self.settings.dispatch_policy in CACHE_AWARE
        self.prefix = summarise(engine.scheduler.pool.recent(SUMMARY_BYTES // 5)) if looks else ""

    def look_again(self) -> None:
        """A draining engine has other requests to report than a ready one; it says so without waiting for a step."""
        self._on_look(self.engine)
        self.loop.call_soon_threadsafe(self.reporter.changed)

    def _on_failure(self, error: BaseException) -> None:
        self.failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        self.loop.call_soon_threadsafe(self._fail)

    # -- on the loop --------------------------------------------------------------------------------------------

    def _fail(self) -> None:
        self.state = DRAINING  # no new requests; check_health has the replica replaced
        for name, client in self.outboxes.clients.items():
            lost = [error_output(request_id, epoch, FAILED, self.failed) for request_id, epoch in client.open.items()]
            self.deliver({name: lost})
        self.reporter.changed(urgent=True)

    def deliver(self, by_client: dict[str, list[Output]]) -> None:
        now = clock.now()
        for name, outputs in by_client.items():
            self.outboxes.push(name, outputs, now)
            self.wake(name)
        self.reporter.changed()

    def wake(self, client: str) -> None:
        event = self.wakeups.get(client)
        if event is not None:
            event.set()

    def streams_to(self, client: str) -> bool:
        """An ingress reads this engine's outputs."""
        return client in self.wakeups and client in self.outboxes.clients

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _item(self, outputs: list[Output], renew: bool = False) -> dict[str, Any]:
        item: dict[str, Any] = {"v": PROTOCOL_VERSION, "engine": self.id, "outputs": outputs}
        return {**item, "renew": True} if renew else item

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.config.lease_s / 4))
            try:
                self._expire()
            except Exception:
                logger.exception("the leases were not looked at")

    def _expire(self) -> None:
        """End the requests of silent ingresses, and the streams of those forgotten."""
        before = set(self.outboxes.clients)
        for request_id, epoch in self.outboxes.expire(clock.now()):
            logger.warning("request %s ended: its ingress has been silent for %g s", request_id, self.config.lease_s)
            self.thread.post(partial(self._abort, request_id, epoch))
        for name in before:
            if name not in self.outboxes.clients:
                self.wake(name)
                self.wakeups.pop(name, None)
            elif self.outboxes.clients[name].pending:
                self.wake(name)

    def _report(self, sequence: int) -> tuple[dict[str, Any], list[Any]]:
        """The load report and the metrics that go to the manager."""
        report = load_report(self, sequence).to_message()
        families = self.metrics.families(self.thread.stats, self.staying, self.commands.passed_over)
        return {**report, "settings": self.settings_version}, families

    def _on_answer(self, answer: dict[str, Any]) -> None:
        """What the manager says to a report: this engine's role, and the settings when they are new."""
        self.role = answer.get("role", self.role)
        if "settings" in answer:
            self.settings = LlumnixSettings.of_message(answer["settings"])
            self.settings_version = answer["settings_version"]
            self._apply_settings()

    def _apply_settings(self) -> None:
        """What of the settings lives in the engine; one that still starts takes it when it is there."""
        if hasattr(self, "engine"):
            reservations = self.engine.scheduler.reservations
            self.thread.post(partial(setattr, reservations, "seconds", self.settings.reservation_timeout_s))
