"""What a step says about a request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import Request
from engine.step import TokenLogprobs

# Kinds of errors that end a request in the engine.
QUEUE_TIMEOUT = "queue_timeout"  # it waited longer than max_queue_time
NOT_FINITE = "not_finite"  # its logits are no finite numbers


@dataclass(slots=True)
class Event:
    """One new token of a request, or its end. Exactly one event of a request has finish_reason or error set."""

    request: Request
    index: int  # of the token in the output; of the next one if there is no token
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    error: str | None = None  # kind of a typed error
