"""An ingress's connection to engines and manager, all of them fakes: whatever fails once, the next time works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from engine.config import EngineConfig
from llumnix.load import READY, LoadReport
from serving import dispatch
from serving.engine_client import EngineClient

SOON = 5.0


class Method:
    """Looks like a method of a Ray actor or a Serve handle."""

    def __init__(self, call: Callable[..., Any]):
        self.call = call

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *arguments: Any) -> Any:
        return self.call(*arguments)


async def ready(value: Any) -> Any:
    return value


class FakeEngine:
    """Answers every request with one token a moment, `length` of them."""

    def __init__(self, name: str = "a", length: int = 3):
        self.name, self.length = name, length
        self.items: asyncio.Queue[list[dict[str, Any]] | Exception] = asyncio.Queue()
        self.renewals: list[float] = []
        self.drained: list[tuple[Any, ...]] = []
        self.submitted: dict[str, dict[str, Any]] = {}
        self.stream = Method(self._stream)
        self.add, self.renew, self.drain = Method(self._add), Method(self._renew), Method(self._drain)
        self.abort, self.replay = Method(lambda *_: ready(None)), Method(lambda *_: ready([]))

    async def _stream(self, client: str, cursors: dict[str, int]) -> AsyncIterator[Awaitable[dict[str, Any]]]:
        for name, start in cursors.items():  # by cursor, as a real engine's
            self.items.put_nowait(self._outputs(name)[start:])
        while True:
            item = await self.items.get()
            if isinstance(item, Exception):
                raise item
            yield ready({"outputs": item})

    async def _add(self, message: dict[str, Any]) -> None:
        self.submitted[message["id"]] = message
        for output in self._outputs(message["id"])[len(message["output"]) :]:
            self.items.put_nowait([output])

    def _outputs(self, name: str) -> list[dict[str, Any]]:
        message = self.submitted[name]
        outputs = [
            {"id": name, "epoch": message["epoch"], "index": index, "token": 50 + index} for index in range(self.length)
        ]
        return [*outputs[:-1], {**outputs[-1], "finish": "length"}]

    async def _renew(self, *_: Any) -> None:
        self.renewals.append(asyncio.get_running_loop().time())

    async def _drain(self, *arguments: Any) -> None:
        self.drained.append(arguments)


class FakeManager:
    """Knows some engines and has a new view at every poll, a few milliseconds apart."""

    def __init__(self, *engines: FakeEngine):
        self.engines = engines
        self.version = 0
        self.known: list[list[str]] = []
        self.settings: tuple[int, dict[str, Any]] | None = None
        self.sent: list[int] = []  # versions that were answered with the settings
        self.view = Method(self._view)

    async def _view(self, version: int, known: list[str], settings_version: int) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        self.version += 1
        self.known.append(known)
        entries = {}
        for engine in self.engines:
            report = LoadReport(engine.name, 1.0, self.version, state=READY, total_blocks=99, free_blocks=99)
            actor = None if engine.name in known else engine
            entries[engine.name] = {"actor": actor, "report": report.to_message()}
        view: dict[str, Any] = {"v": 1, "version": self.version, "engines": entries}
        if self.settings is not None and settings_version != self.settings[0]:
            view |= {"settings_version": self.settings[0], "settings": self.settings[1]}
            self.sent.append(settings_version)
        return view


class Harness:
    def __init__(self, *engines: FakeEngine, **config: Any):
        self.engines = engines
        self.manager = FakeManager(*engines)
        self.client = EngineClient(EngineConfig(model="m", **config), self.manager)

    async def __aenter__(self) -> Harness:
        self.client.start()
        return self

    async def __aexit__(self, *_: Any) -> None:
        for task in self.client._tasks:
            task.cancel()

    async def until_ready(self) -> None:
        await until(lambda: len(self.client.links) == len(self.engines))

    async def generate(self, name: str = "r") -> list[int]:
        """The tokens of a whole request."""
        tokens: list[int] = []
        async with asyncio.timeout(SOON), aclosing(self.client.generate(name, [1, 2], {})) as batches:
            async for outputs in batches:
                assert not any("error" in output for output in outputs), outputs
                tokens += [output["token"] for output in outputs]
        return tokens


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.005)


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[bool]:
    """The next call of a function raises; returns a list with an entry for each call since."""
    original, calls = getattr(owner, name), list[bool]()

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(True)
        if len(calls) == 1:
            raise ZeroDivisionError("unforeseen")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, wrapped)
    return calls


# What fails once


@pytest.mark.parametrize("name", ["_merge", "_renew_all", "tick", "cursors"])
async def test_no_loop_ends_with_an_unforeseen_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(FakeEngine(), lease_s=0.2)
    owner = harness.client if name.startswith("_") else harness.client.tracker
    calls = fails_once(monkeypatch, owner, name)
    async with harness:
        await until(lambda: len(calls) > 2)
        await harness.until_ready()
        assert await harness.generate() == [50, 51, 52]


async def test_any_error_of_a_stream_is_a_break_that_costs_no_token() -> None:
    engine = FakeEngine(length=4)
    async with Harness(engine) as harness:
        await harness.until_ready()
        for wrong in ([{"no": "output"}], ValueError("not Ray's")):
            engine.items.put_nowait(wrong)  # type: ignore[arg-type]
            assert await harness.generate(repr(wrong)) == [50, 51, 52, 53]
        assert list(harness.client.links) == ["a"]


async def test_an_engine_whose_streams_keep_breaking_is_lost_for_a_while() -> None:
    broken, whole = FakeEngine("a"), FakeEngine("b")
    for _ in range(3):
        broken.items.put_nowait(ValueError("again"))
    async with Harness(broken, whole) as harness:
        await until(lambda: "a" in harness.client.avoid)
        assert await harness.generate() == [50, 51, 52] and "r" in whole.submitted


async def test_an_effect_that_fails_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    def cannot(*_: Any) -> None:
        raise ZeroDivisionError("unforeseen")

    engine.abort = Method(cannot)
    async with Harness(engine) as harness:
        await harness.until_ready()
        add = engine.add.call

        async def with_a_stranger(message: dict[str, Any]) -> None:
            engine.submitted[message["id"]] = message
            stranger = {"id": "gone", "epoch": [0, 0], "index": 0, "token": 1}  # to be aborted
            engine.items.put_nowait([stranger, *engine._outputs(message["id"])])

        engine.add = Method(with_a_stranger)
        assert await harness.generate("r") == [50, 51, 52]
        engine.add = Method(add)
        calls = fails_once(monkeypatch, dispatch, "choose")
        assert await harness.generate("s") == [50, 51, 52] and len(calls) == 2


async def test_a_submission_that_fails_in_any_way_is_made_again() -> None:
    engine = FakeEngine()
    async with Harness(engine) as harness:
        await harness.until_ready()
        add, failures = engine.add.call, [ZeroDivisionError("unforeseen")]

        async def fail_once(message: dict[str, Any]) -> None:
            if failures:
                raise failures.pop()
            await add(message)

        engine.add = Method(fail_once)
        assert await harness.generate() == [50, 51, 52]


# Leases, the view, the end


@pytest.mark.parametrize("lease_s", [0.2, 0.4])
async def test_leases_are_renewed_four_times_as_often_as_they_end(lease_s: float) -> None:
    engine = FakeEngine()
    engine.add = Method(lambda message: ready(None))  # its request stays open
    async with Harness(engine, lease_s=lease_s) as harness:
        await harness.until_ready()
        running = asyncio.create_task(harness.generate())
        await until(lambda: len(engine.renewals) > 4)
        running.cancel()
    gaps = [b - a for a, b in zip(engine.renewals[1:], engine.renewals[2:], strict=False)]
    assert max(gaps) < lease_s and min(gaps) > lease_s / 5


async def test_the_manager_is_told_which_engines_are_known_and_a_lost_one_is_asked_for_again() -> None:
    engine = FakeEngine()
    async with Harness(engine) as harness:
        await harness.until_ready()
        await until(lambda: harness.manager.known[-1] == ["a"])
        assert harness.manager.known[0] == []
        harness.client._lose(harness.client.links["a"])
        harness.client.avoid.clear()
        await harness.until_ready()
        assert await harness.generate() == [50, 51, 52]


async def test_a_drain_of_the_application_says_so_to_every_engine() -> None:
    engines = FakeEngine("a"), FakeEngine("b")
    async with Harness(*engines) as harness:
        await harness.until_ready()
        await harness.client.drain_engines(0.5)
        assert [engine.drained for engine in engines] == [[(0.5, True)], [(0.5, True)]]


async def test_the_policy_is_the_managers_and_is_asked_for_once() -> None:
    engines = FakeEngine("a"), FakeEngine("b")
    async with Harness(*engines) as harness:
        harness.manager.settings = 5, {"dispatch_policy": "round_robin", "of_a_newer_version": 1}
        await harness.until_ready()
        await until(lambda: harness.client.settings_version == 5)
        for i in range(4):
            await harness.generate(f"r{i}")
        assert [list(engine.submitted) for engine in engines] == [["r0", "r2"], ["r1", "r3"]]
        assert harness.client.dispatcher.decisions == {("a", "round_robin"): 2, ("b", "round_robin"): 2}
        assert harness.manager.sent == [-1]


async def test_a_lost_engine_leaves_the_fleet() -> None:
    engines = FakeEngine("a"), FakeEngine("b")
    async with Harness(*engines) as harness:
        await harness.until_ready()
        assert len(harness.client.dispatcher.fleet) == 2
        harness.client._lose(harness.client.links["a"], forever=True)
        assert harness.client.dispatcher.fleet.names == ["b"]
        assert await harness.generate() == [50, 51, 52]


class SilentEngine(FakeEngine):
    """Its first stream was lost on the way here: it never brings anything, and does not break."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0

    async def _stream(self, client: str, cursors: dict[str, int]) -> AsyncIterator[Awaitable[dict[str, Any]]]:
        self.opened += 1
        if self.opened == 1:
            await asyncio.Event().wait()
        async for item in super()._stream(client, cursors):
            yield item

    async def _renew(self, *_: Any) -> dict[str, Any]:
        return {"v": 1, "untaken_s": 60.0 if self.opened == 1 and self.submitted else 0.0}


async def test_a_stream_that_is_silent_without_having_broken_is_opened_again() -> None:
    engine = SilentEngine()
    async with Harness(engine, lease_s=0.4) as harness:
        await harness.until_ready()
        assert await harness.generate() == [50, 51, 52]
        assert engine.opened == 2
        assert harness.client.tracker.resumed == 0


async def test_nothing_new_goes_to_an_engine_that_does_not_answer_while_another_does() -> None:
    hung, other = FakeEngine("a"), FakeEngine("b")  # a is the first choice

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    hung.add = hung.renew = Method(never)
    async with Harness(hung, other, lease_s=0.6) as harness:
        await harness.until_ready()
        caught = asyncio.create_task(harness.generate("caught"))
        link = harness.client.links["a"]
        await until(lambda: link.unanswered_since is not None)
        clock = asyncio.get_running_loop().time
        await until(lambda: clock() - link.unanswered_since > dispatch.BOOKING_S + 0.1)
        assert "a" in harness.client.links, "it is not given up yet"
        assert await harness.generate("new") == [50, 51, 52] and list(other.submitted) == ["new"]
        assert await caught == [50, 51, 52], "in the end it is"

    alone = FakeEngine("a")
    alone.renew = Method(never)
    async with Harness(alone, lease_s=0.4) as harness:
        await harness.until_ready()
        harness.client.links["a"].unanswered_since = clock() - 0.3
        assert await harness.generate("new") == [50, 51, 52], "there is no other"
