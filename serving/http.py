"""The HTTP shapes of our answers: event streams, errors, bounded bodies."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serving.openai.errors import APIError, bad_request, internal, shown
from serving.openai.streaming import DONE, error_event

logger = logging.getLogger("ferry.ingress")

MAX_BODY_BYTES = 8 << 20
PRIORITY = "X-Priority"
PRIORITY_LIMIT = 2**31


class EventStream(Response):
    """Server-sent events from an iterator of encoded chunks. While the client is slow, tokens gather upstream."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]):
        self.first, self.rest = first, rest
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "content-type": "text/event-stream; charset=utf-8"})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with aclosing(self.rest) as rest:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
            last = DONE
            try:
                async for chunk in rest:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except APIError as error:
                last = error_event(error)
            except Exception:
                logger.exception("a stream failed")
                last = error_event(internal())
            await send({"type": "http.response.body", "body": last, "more_body": False})


def error_response(error: APIError, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(error.body(), error.status, {**error.headers, **(headers or {})})


async def read_body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise APIError(413, f"the request body is larger than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def priority_of(headers: Headers) -> int | None:
    """The integer in X-Priority; None without that header. Raises APIError 400."""
    texts = headers.getlist(PRIORITY)
    if not texts:
        return None
    if len(texts) > 1:
        raise bad_request(f"{PRIORITY} is there {len(texts)} times, must be there once", PRIORITY)
    if not re.fullmatch(r"\s*-?[0-9]{1,20}\s*", texts[0], re.ASCII):
        raise bad_request(f"{PRIORITY} is {shown(texts[0])}, must be an integer", PRIORITY)
    value = int(texts[0])
    if not -PRIORITY_LIMIT <= value < PRIORITY_LIMIT:
        raise bad_request(
            f"{PRIORITY} is {shown(value)}, must be at least {-PRIORITY_LIMIT} and below {PRIORITY_LIMIT}", PRIORITY
        )
    return value


async def http_exception(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods, in OpenAI's shape."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(APIError(error.status_code, message), dict(error.headers or {}))
