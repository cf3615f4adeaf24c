"""What an engine's supervisor takes for its death or illness, and what for the end of the application."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RaySystemError
from ray.serve.schema import ApplicationStatus

from serving import application, watch
from serving.watch import MIN_SILENT_PINGS, Watch, until_death


class Actor:
    """Its `until_death` raises these, one a call."""

    def __init__(self, *errors: Exception):
        self.errors = list(errors)
        self.until_death = self

    async def remote(self) -> None:
        if not self.errors:
            await asyncio.Event().wait()
        raise self.errors.pop(0)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "UNREACHABLE_RETRY_S", 0.01)
    monkeypatch.setattr(watch, "PING_S", 0.02)
    monkeypatch.setattr(application, "STATUS_TIMEOUT_S", 0.1)


async def test_a_dead_actor_is_dead() -> None:
    await asyncio.wait_for(until_death(Actor(ActorDiedError())), 1.0)


@pytest.mark.parametrize(
    "error",
    [ActorUnavailableError("cut off", None), RayActorError(), RaySystemError("x"), TimeoutError()],
    ids=lambda error: type(error).__name__,
)
async def test_an_actor_that_cannot_be_reached_for_a_while_is_not_dead(error: Exception) -> None:
    actor = Actor(error, error)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(until_death(actor), 0.2)
    assert not actor.errors
    await asyncio.wait_for(until_death(Actor(error, ActorDiedError())), 1.0)


class Pinged:
    """Answers pings with what `answers` says, one a ping, then for ever with the last; None: never."""

    def __init__(self, *answers: dict[str, Any] | Exception | None):
        self.answers = list(answers)
        self.dead = asyncio.Event()
        self.until_death = SimpleNamespace(remote=self._until_death)
        self.ping = SimpleNamespace(remote=self._ping)

    async def _until_death(self) -> None:
        await self.dead.wait()
        raise ActorDiedError()

    async def _ping(self) -> dict[str, Any]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer


async def test_an_engine_that_answers_is_well_and_its_death_ends_the_watch() -> None:
    actor = Pinged({"running": 1}, {"running": 2})
    seen = Watch(actor, 10.0)
    running = asyncio.create_task(seen.run())
    await asyncio.sleep(0.1)
    assert seen.answer == {"running": 2} and seen.error == "" and not running.done()
    actor.dead.set()
    assert await asyncio.wait_for(running, 1.0) == "its process died"


async def test_an_engine_that_says_it_is_unwell_is_watched_on_and_may_recover() -> None:
    actor = Pinged(RuntimeError("a step has taken 61 s"), RuntimeError("a step has taken 62 s"), {"running": 0})
    seen = Watch(actor, 0.1)
    running = asyncio.create_task(seen.run())
    await asyncio.sleep(0.01)
    assert seen.error == "a step has taken 61 s"
    await asyncio.sleep(0.2)
    assert seen.error == "" and seen.answer == {"running": 0} and not running.done()
    running.cancel()


async def test_silence_for_long_is_the_end_and_for_a_moment_it_is_not() -> None:
    assert "silent" in await asyncio.wait_for(Watch(Pinged({"running": 0}, None), 0.1).run(), 1.0)
    moment = [None] * (MIN_SILENT_PINGS - 1)
    actor = Pinged(*moment, {}, *moment, {})
    running = asyncio.create_task(Watch(actor, 0.0).run())
    await asyncio.sleep(0.3)
    assert actor.answers == [{}] and not running.done()
    running.cancel()


@pytest.mark.parametrize(
    ("status", "going"),
    [(ApplicationStatus.DELETING, True), (ApplicationStatus.DEPLOYING, False), (ApplicationStatus.RUNNING, False)],
)
async def test_the_application_is_going_when_it_is_deleted(
    monkeypatch: pytest.MonkeyPatch, status: ApplicationStatus, going: bool
) -> None:
    applications: dict[str, Any] = {"llm": SimpleNamespace(status=status)}
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="llm"))
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=applications))
    assert await application.application_is_going() is going
    applications.clear()
    assert await application.application_is_going() is True


async def test_a_controller_that_does_not_answer_means_that_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RaySystemError("x")

    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="llm"))
    monkeypatch.setattr(serve, "status", fail)
    assert await application.application_is_going() is False
