"""What an engine's supervisor takes for its death, and what for the end of the application."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RaySystemError
from ray.serve.schema import ApplicationStatus

from serving import replica


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
    monkeypatch.setattr(replica, "UNREACHABLE_RETRY_S", 0.01)
    monkeypatch.setattr(replica, "STATUS_TIMEOUT_S", 0.1)


async def test_a_dead_actor_is_dead() -> None:
    await asyncio.wait_for(replica.until_death(Actor(ActorDiedError())), 1.0)


@pytest.mark.parametrize(
    "error",
    [ActorUnavailableError("cut off", None), RayActorError(), RaySystemError("x"), TimeoutError()],
    ids=lambda error: type(error).__name__,
)
async def test_an_actor_that_cannot_be_reached_for_a_while_is_not_dead(error: Exception) -> None:
    actor = Actor(error, error)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(replica.until_death(actor), 0.2)
    assert not actor.errors
    await asyncio.wait_for(replica.until_death(Actor(error, ActorDiedError())), 1.0)


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
    assert await replica.application_is_going() is going
    applications.clear()
    assert await replica.application_is_going() is True


async def test_a_controller_that_does_not_answer_means_that_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RaySystemError("x")

    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="llm"))
    monkeypatch.setattr(serve, "status", fail)
    assert await replica.application_is_going() is False
