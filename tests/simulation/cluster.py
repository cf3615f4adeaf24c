"""Engines, ingresses and managers as processes, and what must hold of them."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv import BlockPool, HostTier
from engine.request import Request, Status
from engine.scheduler import SchedulerConfig
from llumnix.load import STARTING
from serving.engine_client import EngineClient
from serving.engine_node import EngineNode
from serving.manager import Manager
from serving.messages import NO_ENGINE
from tests.fakes import VOCAB, FakeExecutor
from tests.simulation.engine_thread import SimulatedThread
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Handle, Network
from tests.simulation.users import LOST, User

BLOCK_SIZE = 8
MAX_LENGTH = 160
FORGET_S = 15.0  # engines forget ingresses after this long, so that runs are short
MANAGER = "manager"
OPERATOR = "operator"
OVER = "the engine is not running any more"  # after a failed step
MESSAGES = frozenset({"v", "epoch", "temperature", "enable_moves", "outcome"})  # dicts with these are no tables


class InjectedFailure(Exception):
    """A step fails because the run wants it to."""


@dataclass
class Shape:
    """One cluster."""

    engines: int = 2
    ingresses: int = 1
    managers: int = 1
    blocks: int = 48
    host_blocks: int = 0
    seats: int = 8
    step_s: float = 0.02
    copy_s: float = 0.01
    lease_s: float = 3.0
    policy: str = "fcfs"
    reservation_s: float = 3.0
    compat_keys: tuple[str, ...] = ("kv",)  # of the engines in turn
    newer: tuple[str, ...] = ()  # processes whose messages have keys that others do not know
    settings: dict[str, Any] = field(default_factory=dict)
    replaced: bool = True  # what dies is started anew


class Cluster:
    """`violations` is empty as long as all is well."""

    def __init__(self, shape: Shape, random: Random, trace: list[str] | None = None):
        self.shape = shape
        self.random = random
        self.trace = trace
        self.loop = VirtualLoop()
        self.network = Network(self.loop, Random(random.random()), note=self.note if trace is not None else _nothing)
        self.network.edit = self._edit
        self.violations: list[str] = []
        self.processes: list[Process] = []
        self.nodes: dict[str, EngineNode] = {}  # live ones
        self.clients: dict[str, EngineClient] = {}
        self.managers: dict[str, Any] = {}
        self.users: list[User] = []
        self.newer = set(shape.newer)
        self.heard: set[str] = set()  # those of them that have said something
        self.moved: dict[str, int] = defaultdict(int)  # outcomes of the moves that a source has ended
        self.on_hold: Callable[[str, str], None] = lambda engine, request: None
        self.on_read: Callable[[str], Callable[[], bool] | None] = lambda engine: None  # a condition to wait for
        self._owner: dict[tuple[str, tuple[int, int]], str] = {}
        self._taken: set[tuple[str, tuple[int, int]]] = set()
        self._doubled: dict[str, float] = {}
        self._numbers: dict[str, int] = defaultdict(int)
        self.config = {
            "model": "m",
            "block_size": BLOCK_SIZE,
            "lease_s": shape.lease_s,
            "max_resumes": 1000,
            "log_level": "INFO" if trace is not None else "ERROR",
        }
        self.operator = self._process(OPERATOR, None)

    # -- processes ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        for _ in range(self.shape.managers):
            self.add_manager()
        for _ in range(self.shape.engines):
            self.add_engine()
        for _ in range(self.shape.ingresses):
            self.add_ingress()

    def add_engine(self, compat_key: str | None = None) -> str:
        name = self._name("engine")
        keys = self.shape.compat_keys
        key = keys[self._numbers["engine"] % len(keys)] if compat_key is None else compat_key
        process = self._process(name, None)
        node: EngineNode = process.run(EngineNode, self.config, name, Handle(MANAGER))
        node.thread = SimulatedThread(  # type: ignore[assignment]
            partial(self._build, name, key),
            node._on_events,
            partial(self._on_failure, node),
            node._on_look,
            random=Random(self.random.random()),
            step_s=self.shape.step_s,
            after_step=partial(self._check, name),
        )
        node.copy = partial(self._copy, name)
        node.reporter.actor = Handle(name)
        node.outboxes.forget_s = FORGET_S
        self.network.targets[name] = process, node
        self.nodes[name] = node
        process.spawn(node.start())
        return name

    def add_ingress(self) -> str:
        name = self._name("ingress")
        process = self._process(name, None)
        client: EngineClient = process.run(EngineClient, EngineConfig(**self.config), Handle(MANAGER))
        client.name = client.tracker.client = name
        self.network.targets[name] = process, client
        self.clients[name] = client
        process.run(client.start)
        process.spawn(self._report_downtimes(client))
        return name

    def add_manager(self) -> str:
        name = self._name(MANAGER)
        process = self._process(name, MANAGER)
        manager = process.run(Manager.func_or_class)
        process.run(manager.reconfigure, {"llumnix": self.shape.settings})
        self.network.targets[name] = process, manager
        self.managers[name] = manager
        self._managed = self.loop.now
        return name

    def crash(self, name: str, back_after_s: float | None = None) -> None:
        """Kill a process; another one takes its place after a while, under a new name."""
        process, _ = self.network.targets[name]
        if not process.alive:
            return
        self.network.crash(name)
        for table, add in (
            (self.nodes, self.add_engine),
            (self.clients, self.add_ingress),
            (self.managers, self.add_manager),
        ):
            if table.pop(name, None) is not None and self.shape.replaced:  # type: ignore[attr-defined]
                delay = self.random.uniform(0.2, 1.0) if back_after_s is None else back_after_s
                self.later(delay, add)
        for user in self.users:
            if user.ingress == name and user.active:
                user.end = LOST

    def stop(self, name: str, seconds: float) -> None:
        """Like SIGSTOP, and SIGCONT later."""
        process, _ = self.network.targets[name]
        self.network.note("stop", name, f"{seconds:g} s")
        process.stop()
        self.later(seconds, process.go_on)

    async def drain(self, name: str, deadline_s: float) -> dict[str, Any]:
        """What the replica around an engine does when it has to go."""
        process, node = self.network.targets[name]
        self.network.note("drain", name)
        receipt: dict[str, Any] = await process.spawn(node.drain(deadline_s))
        self.crash(name)
        return receipt

    def later(self, delay: float, call: Callable[[], Any]) -> None:
        self.loop.call_later(delay, call, context=self.network.context)

    def process(self, name: str) -> Process:
        return self.network.targets[name][0]

    def alive(self, name: str) -> bool:
        return name in self.network.targets and self.network.targets[name][0].alive

    # -- users --------------------------------------------------------------------------------------------------

    def use(self, user: User, ingress: str) -> None:
        user.ingress, user.started = ingress, self.loop.now
        self.users.append(user)
        self.note("user", user.id, f"{len(user.prompt)} + {len(user.expected)} tokens at {ingress}")
        user.task = self.process(ingress).spawn(user.read(self.clients[ingress]))
        user.task.add_done_callback(partial(self._user_done, user))

    def _user_done(self, user: User, task: asyncio.Task[None]) -> None:
        self.note("user", user.id, "ends:", user.end)
        # Engines that started while there was no manager are unknown to all: that is so, and documented
        unmanaged = not self.managers or self.loop.now - self._managed < 3.0
        user.excused = user.end == NO_ENGINE and unmanaged
        if not task.cancelled() and task.exception() is not None:
            self.violate(str(task.exception()))

    def user(self, request_id: str) -> User | None:
        return next((user for user in self.users if user.id == request_id), None)

    # -- what must hold -----------------------------------------------------------------------------------------

    def violate(self, what: str) -> None:
        self.note("VIOLATION", what)
        self.violations.append(f"at {self.loop.now:.3f} s: {what}")

    def owns(self, engine: str, request: Request, new: bool) -> None:
        """An epoch of a request belongs to one engine, once; and until the ingress starts the request again, no other
        engine goes on with it."""
        owner = self._owner.setdefault((request.id, request.epoch), engine)
        if owner != engine:
            self.violate(f"{request.id} under epoch {request.epoch} is owned by {owner} and by {engine}")
        elif new and (request.id, request.epoch) in self._taken and self._wanted(request.id):
            self.violate(f"{engine} takes {request.id} under epoch {request.epoch} a second time")
        self._taken.add((request.id, request.epoch))
        for name, node in self.nodes.items():
            other = (
                node.engine.scheduler.requests.get(request.id) if name != engine and node.state != STARTING else None
            )
            if other is not None and other.epoch[0] == request.epoch[0] and other.status is not Status.HELD:
                self.violate(f"{request.id} goes on at {name} {other.epoch} and at {engine} {request.epoch}")

    def _check_history(self, engine: str, request: Request, known: int) -> None:
        """Whoever takes a request over has every token of it that its ingress lacks: the source may be gone."""
        node, client = self.nodes.get(engine), self.clients.get(request.client)
        box = node.outboxes.clients.get(request.client) if node is not None else None
        tracked = client.tracker.requests.get(request.id) if client is not None else None
        if box is None or tracked is None or self.process(engine).stopped:
            return
        if box.newest.get(request.id) != list(request.epoch) or request.id not in box.history:
            return
        missing = set(range(len(tracked.output), known)) - {output["index"] for output in box.history[request.id]}
        if missing:
            self.violate(f"{engine} took {request.id} without its tokens {sorted(missing)}")

    def _wanted(self, request_id: str) -> bool:
        """Somebody waits for it. A submission that comes after its end is found out and dropped a moment later."""
        user = self.user(request_id)
        return user is not None and user.active

    def look(self, longest_s: float) -> None:
        """Requests may be at two engines for a while only: until the older one hears that it has lost them."""
        count: dict[str, int] = defaultdict(int)
        for name, node in self.nodes.items():
            if node.state != STARTING and not self.process(name).stopped:
                for request_id in node.engine.scheduler.requests:
                    count[request_id] += 1
        now = self.loop.now
        self._doubled = {name: self._doubled.get(name, now) for name, number in count.items() if number > 1}
        for name, since in self._doubled.items():
            if now - since > longest_s:
                self.violate(f"{name} is at two engines for {now - since:.1f} s")
                self._doubled = {}
                return

    def unrest(self) -> Iterator[str]:
        """What keeps the cluster from being as if nothing had ever run on it."""
        for user in self.users:
            if user.active:
                yield f"user {user.id} waits for token {len(user.tokens)} since {user.started:.3f} s"
        for name, node in self.nodes.items():
            if node.state == STARTING:
                yield f"{name} starts"
                continue
            scheduler = node.engine.scheduler
            if scheduler.requests:
                yield f"{name} has requests {sorted(scheduler.requests)}"
            if scheduler.reservations.held:
                yield f"{name} has reservations {sorted(scheduler.reservations.held)}"
            if scheduler.pool.available != scheduler.pool.total:
                yield f"{name} has {scheduler.pool.available} of {scheduler.pool.total} blocks free"
            if node.giving.moves:
                yield f"{name} moves {sorted(node.giving.moves)}"
            for client, box in node.outboxes.clients.items():
                if client not in self.clients:
                    yield f"{name} remembers {client}"
                for what in ("pending", "history", "open", "ended", "newest", "closed"):
                    if getattr(box, what):
                        yield f"{name} has {what} outputs of {client}: {getattr(box, what)}"
        for name, client in self.clients.items():
            if client.tracker.requests or client._queues:
                yield f"{name} has requests {sorted(client.tracker.requests)}"
            if client.links.keys() != self.nodes.keys():
                yield f"{name} reads {sorted(client.links)} and there are {sorted(self.nodes)}"
        for name, manager in self.managers.items():
            if manager.rescheduler.open:
                yield f"{name} has open commands {manager.rescheduler.open}"

    # -- inside -------------------------------------------------------------------------------------------------

    def note(self, *words: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.loop.now:9.4f}  " + " ".join(map(str, words)))

    def _name(self, kind: str) -> str:
        self._numbers[kind] += 1
        return f"{kind}-{self._numbers[kind]}"

    def _process(self, name: str, service: str | None) -> Process:
        process = Process(name, self.loop)
        self.processes.append(process)
        self.network.join(name, process, None, service)
        return process

    def _build(self, name: str, compat_key: str) -> Engine:
        shape = self.shape
        config = SchedulerConfig(
            max_num_batched_tokens=64,
            max_num_seqs=shape.seats,
            max_model_len=MAX_LENGTH,
            policy=shape.policy,
            reservation_s=shape.reservation_s,
        )
        executor = FakeExecutor(shape.blocks, BLOCK_SIZE, shape.host_blocks, config=config, seconds_per_token=0.0005)
        pool = BlockPool(shape.blocks, BLOCK_SIZE, HostTier(shape.host_blocks), keep_evicted=shape.host_blocks > 0)
        engine = Engine(executor, pool, config, vocab_size=VOCAB, compat_key=compat_key, clock=self.loop.time)
        add, adopt, hold, unhold = engine.add_request, engine.adopt, engine.hold, engine.unhold

        def adding(*arguments: Any, **options: Any) -> Any:
            request = add(*arguments, **options)
            self.note(name, "adds", request.id, request.epoch)
            self.owns(name, request, True)
            return request

        def adopting(record: dict[str, Any], *arguments: Any) -> Any:
            new = record["id"] not in engine.scheduler.requests
            request = adopt(record, *arguments)
            self.note(name, "adopts", request.id, request.epoch)
            self.owns(name, request, new)
            if request.epoch == arguments[0]:  # else it is here with a newer life, and stays as it is
                self.later(0.0001, partial(self._check_history, name, request, len(record["output"])))
            return request

        def holding(request_id: str) -> Any:
            record = hold(request_id)
            self.on_hold(name, request_id)
            return record

        def unholding(request_id: str) -> None:
            unhold(request_id)
            if request_id in engine.scheduler.requests:
                self.owns(name, engine.scheduler.requests[request_id], False)

        engine.add_request, engine.adopt = adding, adopting  # type: ignore[method-assign]
        engine.hold, engine.unhold = holding, unholding  # type: ignore[method-assign]
        return engine

    async def _copy(self, name: str, call: Callable[[], Any]) -> Any:
        """Copies are made by other threads: at some moment in the middle."""
        condition, until = self.on_read(name), self.loop.now + 1.5
        while condition is not None and not condition() and self.loop.now < until:
            await asyncio.sleep(0.004)
        await asyncio.sleep(self.random.uniform(0, self.shape.copy_s))
        result = call()
        await asyncio.sleep(self.random.uniform(0, self.shape.copy_s))
        return result

    def _check(self, name: str, engine: Engine) -> None:
        try:
            engine.scheduler.check()
        except AssertionError as error:
            self.violate(f"{name}: {error}")

    def _on_failure(self, node: EngineNode, error: BaseException) -> None:
        if not isinstance(error, InjectedFailure):
            self.violate(f"{node.id} failed: {type(error).__name__}: {error}")
        node._on_failure(error)
        self.later(2.0, partial(self.crash, node.id))  # as its health check has it replaced

    async def _report_downtimes(self, client: EngineClient) -> None:
        while True:
            await asyncio.sleep(1.0)
            found, client.tracker.downtimes = client.tracker.downtimes, []
            if found:
                client.manager.downtime.remote(found)

    def _edit(self, sender: str, body: Any) -> Any:
        """Newer code says more than others know."""
        if sender not in self.newer:
            return body
        self.heard.add(sender)
        return _extended(body)

    @contextmanager
    def logs(self) -> Iterator[None]:
        """What our code logs as an error is a violation; everything it says goes into the trace."""
        logger = logging.getLogger("ferry")
        before = logger.handlers[:], logger.level, logger.propagate
        logger.handlers, logger.propagate = [_Listener(self)], False
        try:
            yield
        finally:
            logger.handlers, logger.propagate = before[0], before[2]
            logger.setLevel(before[1])


class _Listener(logging.Handler):
    def __init__(self, cluster: Cluster):
        super().__init__()
        self.cluster = cluster

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.cluster.note("log:", text)
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno >= logging.ERROR and not isinstance(error, InjectedFailure) and OVER not in repr(error):
            self.cluster.violate(f"{text}: {error!r}")


def _extended(body: Any) -> Any:
    if isinstance(body, dict):
        more = {"of_newer_code": [1, 2]} if MESSAGES & body.keys() else {}
        return {key: _extended(value) for key, value in body.items()} | more
    if isinstance(body, tuple | list):
        return type(body)(_extended(value) for value in body) if not hasattr(body, "_fields") else body
    return body


def _nothing(*_: Any) -> None:
    return None
