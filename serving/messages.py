"""The messages between ingresses, engines and the manager: plain dicts, unknown keys ignored.

An *output* is what one step made of one request:

    {"id": str, "epoch": [resume, move], "index": int,     # index of the token; of the next one if there is none
     "token": int, "logprobs": [logprob, rank, [[id, logprob], ...]],
     "finish": "stop" | "length", "error": kind, "message": str, "cached": int,
     "moved": engine}                                      # the request is there now, under this epoch

and a stream item is {"v": 1, "engine": id, "outputs": [output, ...]}, with "renew": true in a stream's last item.
"""

from __future__ import annotations

from typing import Any

from engine.event import NOT_FINITE as NOT_FINITE
from engine.event import QUEUE_TIMEOUT as QUEUE_TIMEOUT
from engine.event import Event
from llumnix.load import PROTOCOL_VERSION as PROTOCOL_VERSION

Output = dict[str, Any]

# Kinds of errors that end a request at one engine, beside QUEUE_TIMEOUT and NOT_FINITE, which the engine itself knows.
# Those in RETRY_ELSEWHERE say nothing about the request itself.
QUEUE_FULL = "queue_full"
INVALID = "invalid"
LEASE = "lease"  # the ingress was silent for too long
DRAINING = "draining"  # the engine takes no new requests
DRAINED = "drained"  # the engine is going away and its time is up
UNKNOWN = "unknown"  # the engine has never heard of the request, or forgot it
FAILED = "engine_failed"
MOVE_FAILED = "move_failed"  # the request was given up for a move that its destination refused in the end
RETRY_ELSEWHERE = frozenset({LEASE, DRAINED, UNKNOWN, FAILED, MOVE_FAILED})

# Said by the ingress, and CLOSING by engines too.
CLOSING = "closing"  # the whole application is going away: there is no other engine
TIMEOUT = "timeout"  # the request took longer than request_timeout_s
NO_ENGINE = "no_engine"  # no engine took the request for long
ENGINE_LOST = "engine_lost"  # it was started again too often

# Reasons beside these for metrics: what ended a sequence without a terminal output.
CANCELLED = "cancelled"  # the client has gone
INTERNAL = "internal"  # an error of ours


def output_of(event: Event) -> Output:
    """The message of an engine event."""
    request = event.request
    output: Output = {"id": request.id, "epoch": list(request.epoch), "index": event.index}
    if event.token is not None:
        output["token"] = event.token
    if event.logprobs is not None:
        found = event.logprobs
        output["logprobs"] = [found.logprob, found.rank, [list(pair) for pair in found.top]]
    if event.index == 0:
        output["cached"] = request.cached_tokens
    if event.finish_reason is not None:
        output["finish"] = event.finish_reason
    if event.error is not None:
        output["error"] = event.error
    return output


def error_output(request_id: str, epoch: list[int] | tuple[int, int], kind: str, message: str = "") -> Output:
    """The terminal message of a request that ends at an engine without a token."""
    return {"id": request_id, "epoch": list(epoch), "index": -1, "error": kind, "message": message}


def moved_output(request_id: str, epoch: tuple[int, int], index: int, destination: str) -> Output:
    """The last message of a request at an engine it has left: where it is, and under which epoch."""
    return {"id": request_id, "epoch": list(epoch), "index": index, "moved": destination}


def is_terminal(output: Output) -> bool:
    return "finish" in output or "error" in output
