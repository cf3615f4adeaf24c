"""An event loop whose time is a number, and processes as scopes of callbacks on it.

Time jumps to the next timer when nothing is ready, so nothing ever sleeps and the order of everything is a function of
the program alone. A callback belongs to the process in whose context it was scheduled: those of a stopped process wait,
those of a dead one never run.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

SCOPE: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
PRUNE = 256  # tasks of a process before the finished ones are forgotten


class Hung(AssertionError):
    """The run did not end within its limits."""


class Process:
    """What one operating system process is to the others: it can be stopped, and it can die.

    It keeps its tasks alive after its death: their `finally` blocks must not run, and certainly not in the collector.
    """

    def __init__(self, name: str, loop: VirtualLoop):
        self.name = name
        self.loop = loop
        self.alive = True
        self.stopped = 0  # how many reasons there are for standing still
        self.tasks: list[asyncio.Task[Any]] = []
        self._waiting: list[asyncio.Handle] = []
        self._context = contextvars.Context()
        self._context.run(SCOPE.set, self)
        self._prune_at = PRUNE

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(coroutine, context=self._context.copy())

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call something as this process."""
        return self._context.copy().run(call, *arguments)

    def stop(self) -> None:
        self.stopped += 1

    def go_on(self) -> None:
        self.stopped -= 1
        if not self.stopped:
            self.loop._ready.extend(self._waiting)
            self._waiting = []

    def die(self) -> None:
        self.alive = False

    def defers(self, handle: asyncio.Handle) -> bool:
        """Whether a callback of this process must not run now."""
        if self.alive and not self.stopped:
            return False
        self._waiting.append(handle)
        return True

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self.tasks.append(task)
        if len(self.tasks) > self._prune_at:
            self.tasks = [t for t in self.tasks if not t.done()]
            self._prune_at = PRUNE + 2 * len(self.tasks)


class VirtualLoop(asyncio.BaseEventLoop):
    """Raises Hung from `run_until_complete` after max_time_s of virtual time or max_callbacks callbacks."""

    def __init__(self, max_time_s: float = 600.0, max_callbacks: int = 3_000_000):
        super().__init__()
        self.now = 0.0
        self.max_time_s = max_time_s
        self.callbacks_left = max_callbacks
        self.errors: list[str] = []  # exceptions nobody took
        self.outside = Process("outside", self)
        self._ready: deque[asyncio.Handle] = deque()
        self._heap: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers = 0
        self._stopping: bool
        self.set_task_factory(_make_task)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        raise AssertionError("a simulation has no threads")

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context['message']}: {context.get('exception')!r}")

    # Shorter than the originals, which check for threads and for a loop that is closed

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers += 1
        heapq.heappush(self._heap, (when, self._timers, timer))
        return timer

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def _run_once(self) -> None:
        ready, heap = self._ready, self._heap
        while not self._stopping:
            if not ready:
                self._advance()
            self.callbacks_left -= 1
            if self.callbacks_left < 0:
                raise Hung(f"at {self.now:.3f} s the run has used up its callbacks")
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(SCOPE)
            if process is None or (process.alive and not process.stopped) or not process.defers(handle):
                handle._run()
            if heap and heap[0][0] <= self.now:
                ready.append(heapq.heappop(heap)[2])

    def _advance(self) -> None:
        """On to the next timer."""
        heap = self._heap
        while heap:
            when, _, handle = heapq.heappop(heap)
            if not handle._cancelled:
                self._ready.append(handle)
                self.now = max(self.now, when)
                if self.now > self.max_time_s:
                    raise Hung(f"the run is not over after {self.max_time_s:g} s of virtual time")
                return
        raise Hung(f"at {self.now:.3f} s nothing is left to do and the run is not over")

    def dispose(self, processes: list[Process]) -> None:
        """End what is left of a run. `finally` blocks find no loop here; what they say about that is of no interest."""
        self.set_exception_handler(lambda loop, context: None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for process in (self.outside, *processes):
                for task in process.tasks:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    if not task.done():
                        try:
                            task.get_coro().close()  # type: ignore[union-attr]
                        except BaseException:
                            continue
                process.tasks = []
                process._waiting = []
            self.close()


def _make_task(loop: Any, coroutine: Any, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context)
    process = context.get(SCOPE) if context is not None else SCOPE.get()
    (process or loop.outside).adopt(task)
    return task


def run_virtually(main: Callable[[], Coroutine[Any, Any, Any]], loop: VirtualLoop) -> Any:
    """Run a coroutine function to its end on a virtual loop. Without the garbage collector: it would choose when
    `finally` blocks of abandoned coroutines run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return loop.run_until_complete(main())
    finally:
        if enabled:
            gc.enable()
