"""The front door: OpenAI's HTTP API and Python handle calls, on token ids behind.

Bodies are parsed from bytes and streams are sent as bytes: FastAPI routes, the rest is ours, so that every error has
OpenAI's shape. A stream's status line waits for its first token, so that a refusal is still an HTTP status.
"""

# No `from __future__ import annotations`: FastAPI resolves the types of routes, and cannot inside a Serve class.

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from ray import serve
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from engine.config import EngineConfig
from engine.source import resolve_model
from engine.text.tokenizer import load_tokenizer
from llumnix.rescheduler import COMMAND_TIMEOUT_S
from serving.api import Answer, Api
from serving.application import application_is_going
from serving.cluster_api import SNAPSHOT_TIMEOUT_S, move_error, parse_move
from serving.engine_client import EngineClient
from serving.http import EventStream, error_response, http_exception, priority_of, read_body
from serving.ingress_metrics import IngressMetrics, dispatch_family
from serving.logs import configure_logging
from serving.metrics import Family, families_of, render
from serving.openai.errors import APIError, internal, unavailable
from serving.openai.protocol import body_of
from serving.openai.responses import model_card, model_list

logger = logging.getLogger("ferry.ingress")

T = TypeVar("T")

METRICS_PERIOD_S = 1.0
MANAGER_TIMEOUT_S = 2.0
KEPT_DOWNTIMES = 1000


async def answer_of(call: Awaitable[T], timeout_s: float | None = None) -> T:
    """The manager's answer. Raises APIError 503 when it is down or slow: nobody waits for it without a limit."""
    timeout_s = timeout_s or MANAGER_TIMEOUT_S
    try:
        return await asyncio.wait_for(call, timeout_s)
    except TimeoutError:
        raise unavailable(f"the manager does not answer within {timeout_s:g} s", 1.0) from None
    except Exception as error:
        raise unavailable(f"the manager does not answer: {type(error).__name__}", 1.0) from None


# Everything the routes use is defined or imported above the class: Serve pickles the application at its decoration.
http = FastAPI(title="Ferry", docs_url=None, redoc_url=None, openapi_url=None)
http.add_exception_handler(HTTPException, http_exception)  # type: ignore[arg-type]


@serve.deployment(
    name="Ingress",
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=10_000,
    health_check_period_s=1,
    health_check_timeout_s=10,
    graceful_shutdown_wait_loop_s=0.2,
    max_constructor_retry_count=2,
)
@serve.ingress(http)
class Ingress:
    """`engines` is the engines' deployment: bound here so that Serve starts and deletes it with the application."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: dict[str, Any], manager: Any, engines: Any
    ) -> None:
        self.config = EngineConfig(**config)
        configure_logging(self.config.log_level)
        self.manager = manager
        self.engines = engines
        self.created = int(time.time())
        self.tokenizer = None
        if not self.config.skip_tokenizer_init:
            path = await asyncio.to_thread(resolve_model, self.config.model, weights=False)
            self.tokenizer = await asyncio.to_thread(load_tokenizer, path)
        wake = self._wake if self.config.min_replicas == 0 else None
        self.client = EngineClient(self.config, manager, application_is_going, wake)
        self.metrics = IngressMetrics(self.client.name)
        self.api = Api(self.config, self.tokenizer, self.client, self.metrics)
        self.client.start()
        self._pushing = asyncio.create_task(self._push_metrics())

    # -- Python handles -----------------------------------------------------------------------------------------

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """A chat completion for other Ray applications: `serve.get_app_handle("llm").chat.remote({...})`."""
        return await self._complete(self.api.chat, request)

    async def chat_stream(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Its chunks: `handle.options(stream=True).chat_stream.remote({...})`."""
        async for chunk in self._chunks(self.api.chat, request):
            yield chunk

    async def completions(self, request: dict[str, Any]) -> dict[str, Any]:
        """A text completion."""
        return await self._complete(self.api.completion, request)

    async def completions_stream(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a text completion."""
        async for chunk in self._chunks(self.api.completion, request):
            yield chunk

    async def drain(self, deadline_s: float) -> None:
        """End every request of the application within deadline_s: it is about to be deleted."""
        await self.client.drain_engines(deadline_s)

    async def cluster(self) -> dict[str, Any]:
        """Every engine with its state, blocks and freeness, as the manager sees them. Raises APIError 503."""
        return await answer_of(self.manager.snapshot.remote(), SNAPSHOT_TIMEOUT_S + MANAGER_TIMEOUT_S)

    async def migrate(self, request_id: str, destination: str, **options: Any) -> dict[str, Any]:
        """Move a running request to another replica; the move, as in cluster(). Raises APIError 404, 409 or 503.

        `options` of this one move: mechanism "live", "stop_and_copy", "recompute" or "requeue", and the keys of
        kv_transfer_config.
        """
        if not await answer_of(self.manager.knows_engines.remote()):
            raise unavailable("the manager has just started and knows no replica yet", 1.0)
        call = self.manager.migrate.remote(request_id, destination, options)
        answer = await answer_of(call, COMMAND_TIMEOUT_S + MANAGER_TIMEOUT_S)
        if "error" in answer:
            raise move_error(answer)
        return answer

    async def info(self) -> dict[str, Any]:
        """This ingress: its name towards the engines, its process, its open requests, how many it started again."""
        tracker = self.client.tracker
        return {"name": self.client.name, "pid": os.getpid(), "open": len(tracker.requests), "resumed": tracker.resumed}

    # -- HTTP ---------------------------------------------------------------------------------------------------

    @http.post("/v1/chat/completions")
    async def http_chat(self, request: Request) -> Response:
        return await self._respond(self.api.chat, request)

    @http.post("/v1/completions")
    async def http_completions(self, request: Request) -> Response:
        return await self._respond(self.api.completion, request)

    @http.get("/v1/models")
    async def http_models(self) -> Response:
        return JSONResponse(model_list(self.config.served_model_name, self.created, self.api.max_model_len))

    @http.get("/v1/models/{name:path}")
    async def http_model(self, name: str) -> Response:
        try:
            self.api.check_model(name)
        except APIError as error:
            return error_response(error)
        return JSONResponse(model_card(name, self.created, self.api.max_model_len))

    @http.get("/health")
    async def http_health(self) -> Response:
        if self.client.ready:
            return JSONResponse({"status": "ready"})
        if self.client.may_wake:
            return JSONResponse({"status": "idle", "phase": self.client.phase})
        return JSONResponse({"status": "unavailable", "phase": self.client.phase}, 503, {"Retry-After": "1"})

    @http.get("/cluster")
    async def http_cluster(self) -> Response:
        try:
            return JSONResponse(await self.cluster())
        except APIError as error:
            return error_response(error)

    @http.post("/cluster/migrate")
    async def http_migrate(self, request: Request) -> Response:
        try:
            return JSONResponse(await self.migrate(*parse_move(await read_body(request))))
        except APIError as error:
            return error_response(error)

    @http.get("/metrics")
    async def http_metrics(self) -> Response:
        try:
            text = await answer_of(self.manager.metrics_text.remote())
        except APIError:  # the manager is down: this ingress at least
            text = render([self._families()])
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # -- inside -------------------------------------------------------------------------------------------------

    async def _respond(self, handler: Callable[..., Awaitable[Answer]], request: Request) -> Response:
        try:
            answer = await handler(await read_body(request), priority_of(request.headers))
            if answer.stream is None:
                return JSONResponse(await answer.whole())
            stream = answer.stream()
            try:
                first = await anext(stream)
            except BaseException:
                await stream.aclose()
                raise
            return EventStream(first, stream)
        except APIError as error:
            return error_response(error)
        except Exception:
            logger.exception("a request failed")
            return error_response(internal())

    async def _complete(self, handler: Callable[[bytes], Awaitable[Answer]], request: dict[str, Any]) -> dict[str, Any]:
        answer = await handler(body_of(request, stream=False))
        return await answer.whole()

    async def _chunks(
        self, handler: Callable[[bytes], Awaitable[Answer]], request: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        answer = await handler(body_of(request, stream=True))
        assert answer.stream is not None
        async with aclosing(answer.stream()) as events:
            async for event in events:
                for line in event.split(b"\n\n"):
                    if line.startswith(b"data: {"):
                        yield json.loads(line[6:])

    async def _wake(self) -> None:
        call = self.engines.wake.remote()
        try:
            await call
        except asyncio.CancelledError:
            call.cancel()
            raise

    async def _push_metrics(self) -> None:
        tracker = self.client.tracker
        while True:
            await asyncio.sleep(METRICS_PERIOD_S)
            families = self._families()
            with suppress(APIError):  # the next ones will do
                await answer_of(self.manager.metrics.remote(self.client.name, families))
            downtimes, tracker.downtimes = tracker.downtimes, []
            try:
                if downtimes:
                    await answer_of(self.manager.downtime.remote(downtimes))
            except APIError:  # those of a manager that is away for long are of no use any more
                tracker.downtimes = [*downtimes, *tracker.downtimes][-KEPT_DOWNTIMES:]

    def _families(self) -> list[Family]:
        self.metrics.resumed.set(self.client.tracker.resumed)
        return [
            *families_of(self.metrics.registry),
            dispatch_family(self.client.name, self.client.dispatcher.decisions),
        ]
