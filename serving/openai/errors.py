"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic import ValidationError

from engine import values

MESSAGE_LIMIT = 500  # characters

_DICTIONARY = re.compile(r"a valid dictionary( or instance of \w+)?")  # JSON's word is object


class APIError(Exception):
    """An answer with status >= 400. The message is one line for the caller: what is wrong, the value, what is right."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = " ".join(message.split())
        self.message = message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 3] + "..."
        super().__init__(self.message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def __reduce__(self) -> tuple[Any, ...]:
        """It crosses processes as the error of a handle call; Exception alone would remember only the message."""
        return _restore, (self.status, self.message, self.type, self.param, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def not_found_model(model: str, known: list[str]) -> APIError:
    message = f"model {shown(model)} does not exist, this server has {', '.join(known)}"
    return APIError(404, message, param="model", code="model_not_found")


def too_many_requests(message: str, retry_after_s: float) -> APIError:
    headers = _retry_after(retry_after_s)
    return APIError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def unavailable(message: str, retry_after_s: float) -> APIError:
    headers = _retry_after(retry_after_s)
    return APIError(503, message, type="service_unavailable_error", code="service_unavailable", headers=headers)


def internal(message: str = "internal error, see the server's log") -> APIError:
    """The message is for the caller: never pass the text of an exception, which may hold paths."""
    return APIError(500, message, type="server_error", code="internal_error")


def from_validation(error: ValidationError) -> APIError:
    """One sentence on the first field that is wrong, and the number of the others."""
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    param = field_path(first["loc"])
    match first["type"]:
        case "extra_forbidden":
            message = f"unknown field {shown(param)}"
        case "missing":
            message = f"{param} is missing"
        case "value_error":
            message = first["msg"].removeprefix("Value error, ")
            if len(first["loc"]) > 1:
                message = f"{param}: {message}"
            param = param or message.split(maxsplit=1)[0]  # checks of several fields start with the one to change
        case _:
            reason = _DICTIONARY.sub("an object", first["msg"].replace("Input should be", "must be"))
            message = f"{param} is {shown(first['input'])}, {reason}" if param else reason
    if len(problems) > 1:
        message += f" (and {len(problems) - 1} more)"
    return bad_request(message, param or None)


def field_path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') -> 'messages[0].role'."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def shown(value: Any) -> str:
    """A wrong value, short enough to show back; of a large one only its kind."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return values.shown(value)


def _restore(
    status: int, message: str, type: str, param: str | None, code: str | None, headers: dict[str, str]
) -> APIError:
    return APIError(status, message, type=type, param=param, code=code, headers=headers)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}  # the header knows whole seconds only
