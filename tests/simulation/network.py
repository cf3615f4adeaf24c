"""A network between named processes, seen through handles that look like Ray's.

Nothing is shared: arguments and results are pickled. Messages of a pair overtake each other, items of a stream do not.
A call to a process that is dead, or dies before it answers, raises ActorDiedError at the caller. Whoever watches a
message may lose, repeat or hold it up, or do something to the processes at that very moment.
"""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError

from tests.simulation.loop import SCOPE, Process, VirtualLoop

SENT, ARRIVED, DONE, ANSWERED = "sent", "arrived", "done", "answered"
REPEATABLE = frozenset({"reserve", "write", "commit", "release", "add", "abort", "renew", "report", "downtime"})
POLL_S = 0.004  # between looks at the condition of a message that is held up


@dataclass
class Verdict:
    """What happens to a message."""

    lose: bool = False
    again_s: float | None = None  # it comes a second time, this much later
    extra_s: float = 0.0
    until: Callable[[], bool] | None = None  # held up until this holds, for extra_s at most


PASS = Verdict()


@dataclass(eq=False)
class Call:
    """One request of a method, and its reply."""

    number: int
    source: Process
    target: str  # a process
    method: str
    data: bytes
    future: asyncio.Future[Any]
    stream: Stream | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return pickle.loads(self.data)

    def __str__(self) -> str:
        return f"{self.source.name} -> {self.target} {self.method}#{self.number}"


@dataclass
class Weather:
    """Random behaviour of all messages."""

    fastest_s: float = 0.0005
    typical_s: float = 0.002
    spike: float = 0.0  # share of messages that take up to spike_s longer
    spike_s: float = 0.5
    loss: float = 0.0
    repeat: float = 0.0


@dataclass
class Network:
    loop: VirtualLoop
    random: Random
    weather: Weather = field(default_factory=Weather)
    watch: Callable[[str, Call], Verdict] = lambda phase, call: PASS
    edit: Callable[[str, Any], Any] = lambda sender, body: body  # what newer code would have sent
    note: Callable[..., None] = lambda *words: None
    targets: dict[str, tuple[Process, Any]] = field(default_factory=dict)  # who answers under a name
    services: dict[str, list[str]] = field(default_factory=dict)  # a deployment -> its replicas
    failures: list[str] = field(default_factory=list)  # methods that raised
    apart: dict[frozenset[str], float] = field(default_factory=dict)  # pairs that do not reach each other -> until
    messages: int = 0

    def __post_init__(self) -> None:
        self.context = contextvars.Context()
        self.open: dict[str, dict[Call, None]] = {}  # calls that a process has not answered
        self.queued: dict[str, list[tuple[Call, bool]]] = {}  # calls of a service without replicas
        self.streams: list[Stream] = []

    def join(self, name: str, process: Process, target: Any, service: str | None = None) -> None:
        process.network = self  # type: ignore[attr-defined]
        self.targets[name] = process, target
        if service is not None:
            self.services.setdefault(service, []).append(name)
            for call, once in self.queued.pop(service, []):
                call.target = name
                self._submit(call, once)

    def crash(self, name: str) -> None:
        """A process ends. Its peers learn within moments."""
        self.note("crash", name)
        process, _ = self.targets[name]
        process.die()
        for replicas in self.services.values():
            if name in replicas:
                replicas.remove(name)
        for call in self.open.pop(name, {}):
            self._later(self.random.uniform(0.001, 0.05), self._fail, call)

    def separate(self, one: str, other: str, seconds: float) -> None:
        """For a time two processes do not reach each other: messages are lost, streams break."""
        self.note("separate", one, other, f"{seconds:g} s")
        self.apart[frozenset((one, other))] = self.loop.now + seconds
        for stream in list(self.streams):
            if {stream.call.source.name, stream.call.target} == {one, other}:
                self._later(min(1.0, seconds), stream.cut)

    # -- calls --------------------------------------------------------------------------------------------------

    def call(self, name: str, method: str, arguments: tuple[Any, ...], streaming: bool) -> Any:
        source = SCOPE.get()
        assert source is not None
        replicas = self.services.get(name)
        target = name if replicas is None else (self.random.choice(replicas) if replicas else "")
        self.messages += 1
        arguments = self.edit(source.name, arguments)
        future: asyncio.Future[Any] = self.loop.create_future()
        call = Call(self.messages, source, target, method, pickle.dumps(arguments), future)
        if streaming:
            call.stream = Stream(self, call)
            self.streams.append(call.stream)
        once = streaming or method not in REPEATABLE
        if target:
            self._submit(call, once)
        else:  # it waits for a replica, as Serve's handles do
            self.queued.setdefault(name, []).append((call, once))
        return call.stream or future

    def _submit(self, call: Call, once: bool) -> None:
        if not call.source.alive:
            return  # nobody hears the dead
        self.open.setdefault(call.target, {})[call] = None
        verdict = self.watch(SENT, call)
        if call.source.alive:
            self._send(call, verdict, self._arrive, once)

    def _send(self, call: Call, verdict: Verdict, arrive: Callable[..., None], once: bool, *rest: Any) -> None:
        weather, random = self.weather, self.random
        lose = verdict.lose or self._apart(call)
        if call.stream is None and not lose and random.random() < weather.loss:
            self.note("lost", call)
            lose = True
        again = [] if verdict.again_s is None else [verdict.again_s]
        if not once and random.random() < weather.repeat:
            again.append(random.expovariate(2.0))
        for later in [] if lose else [0.0, *again]:
            delay = weather.fastest_s + random.expovariate(1 / weather.typical_s)
            if random.random() < weather.spike:
                delay += random.uniform(0, weather.spike_s)
            if verdict.until is not None:
                limit = self.loop.now + verdict.extra_s
                self._later(delay + later, self._hold_up, verdict.until, limit, arrive, call, *rest)
            else:
                self._later(delay + later + verdict.extra_s, arrive, call, *rest)

    def _hold_up(self, until: Callable[[], bool], limit: float, arrive: Callable[..., None], *rest: Any) -> None:
        if until() or self.loop.now >= limit:
            arrive(*rest)
        else:
            self._later(POLL_S, self._hold_up, until, limit, arrive, *rest)

    def _arrive(self, call: Call) -> None:
        process, target = self.targets[call.target]
        if process.alive:
            verdict = self.watch(ARRIVED, call)
            if verdict.lose:
                return
        if not process.alive:
            self._later(self.random.uniform(0.001, 0.02), self._fail, call)
        elif call.stream is not None:
            process.spawn(call.stream.pump(getattr(target, call.method)))
        else:
            process.spawn(self._serve(process, call, getattr(target, call.method)))

    async def _serve(self, process: Process, call: Call, method: Callable[..., Awaitable[Any]]) -> None:
        try:
            result, error = await method(*call.arguments), None
        except Exception as raised:
            result, error = None, RuntimeError(f"{type(raised).__name__}: {raised}")
            self.failures.append(f"{self.loop.now:.3f} {call}: {error}")
        verdict = self.watch(DONE, call)
        if process.alive:
            self.open.get(call.target, {}).pop(call, None)
            data = pickle.dumps(self.edit(process.name, result))
            self._send(call, verdict, self._answer, True, data, error)

    def _answer(self, call: Call, data: bytes, error: Exception | None) -> None:
        self.watch(ANSWERED, call)
        if call.source.alive and not call.future.done():
            if error is not None:
                call.future.set_exception(error)
                call.future.exception()  # many do not wait for the answer
            else:
                call.future.set_result(pickle.loads(data))

    def _fail(self, call: Call) -> None:
        if call.stream is not None:
            call.stream.end(ActorDiedError())
        elif not call.future.done():
            call.future.set_exception(ActorDiedError())
            call.future.exception()

    def _apart(self, call: Call) -> bool:
        return self.apart.get(frozenset((call.source.name, call.target)), 0.0) > self.loop.now

    def _later(self, delay: float, call: Callable[..., Any], *arguments: Any) -> None:
        self.loop.call_later(delay, call, *arguments, context=self.context)


class Stream:
    """A generator's items on their way: in order, at most `window` of them not yet read."""

    window = 16

    def __init__(self, network: Network, call: Call):
        self.network = network
        self.call = call
        self.items: deque[bytes] = deque()
        self.unread = 0
        self.broken = False
        self.lose = 0  # the next items to vanish
        self.error: BaseException | None = None
        self._arrival = 0.0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def cut(self) -> None:
        """Both ends live on; the reader gets an error, the writer never learns."""
        self.broken = True
        self.network.note("cut", self.call)
        self.end(ActorUnavailableError("the connection broke", None))

    def end(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            _wake(self._reader)
        if self in self.network.streams:
            self.network.streams.remove(self)

    # -- at the writer ------------------------------------------------------------------------------------------

    async def pump(self, method: Callable[..., AsyncIterator[Any]]) -> None:
        network = self.network
        sender = network.targets[self.call.target][0].name
        async for item in method(*self.call.arguments):
            while self.unread >= self.window:
                self._writer = network.loop.create_future()
                await self._writer
            self.unread += 1
            self._put(self._deliver, pickle.dumps(network.edit(sender, item)))
        self._put(self.end, StopAsyncIteration())

    def _put(self, deliver: Callable[..., None], *arguments: Any) -> None:
        network, weather = self.network, self.network.weather
        delay = weather.fastest_s + network.random.expovariate(1 / weather.typical_s)
        if network.random.random() < weather.spike:
            delay += network.random.uniform(0, weather.spike_s)
        self._arrival = max(self._arrival, network.loop.now + delay)
        network.loop.call_at(self._arrival, deliver, *arguments, context=network.context)

    # -- at the reader ------------------------------------------------------------------------------------------

    def _deliver(self, data: bytes) -> None:
        if self.lose:
            self.lose -= 1
            self.unread -= 1
            self.network.note("item lost", self.call)
        elif not self.broken and not self.network._apart(self.call):
            self.items.append(data)
            _wake(self._reader)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Awaitable[Any]:
        while not self.items:
            if self.error is not None:
                raise self.error
            self._reader = self.network.loop.create_future()
            await self._reader
        data = self.items.popleft()
        self.unread -= 1
        if not self.broken:
            _wake(self._writer)
        reference: asyncio.Future[Any] = self.network.loop.create_future()
        reference.set_result(pickle.loads(data))
        return reference


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


@dataclass(frozen=True)
class Handle:
    """Of an actor, or of a deployment. What it reaches is looked up by the process that calls."""

    name: str

    def __getattr__(self, method: str) -> Method:
        if method.startswith("__"):
            raise AttributeError(method)
        return Method(self.name, method)


@dataclass(frozen=True)
class Method:
    name: str
    method: str
    streaming: bool = False

    def options(self, num_returns: str = "", **_: Any) -> Method:
        return Method(self.name, self.method, num_returns == "streaming")

    def remote(self, *arguments: Any) -> Any:
        process = SCOPE.get()
        assert process is not None, "a remote call from outside of all processes"
        return process.network.call(self.name, self.method, arguments, self.streaming)  # type: ignore[attr-defined]
