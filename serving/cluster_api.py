"""What operators send to /cluster/migrate, and the errors they get."""

from __future__ import annotations

from typing import Any

from serving.openai.errors import APIError, bad_request, shown
from serving.openai.protocol import load_json

SNAPSHOT_TIMEOUT_S = 1.0  # an engine's time to tell of its requests; one that does not is shown without them


def parse_move(body: bytes) -> tuple[str, str]:
    """(request, destination) of a body {"request_id": str, "destination": str}. Raises APIError 400."""
    data = load_json(body)
    names = ("request_id", "destination")
    for name in data:
        if name not in names:
            raise bad_request(f"unknown field {shown(name)}, known are {' and '.join(names)}", name[:60])
    for name in names:
        if not isinstance(data.get(name), str) or not data[name]:
            raise bad_request(f"{name} is {shown(data.get(name))}, must be a text", name)
    return data["request_id"], data["destination"]


def move_error(answer: dict[str, Any]) -> APIError:
    """The HTTP error for what the manager says instead of a move."""
    message = answer["message"]
    if answer["error"] == "not_found":
        return APIError(404, message, code="not_found")
    if answer["error"] == "bad_request":
        return bad_request(message)
    return APIError(409, message, code="conflict")
