"""Streamed responses: server-sent events, one chunk of JSON each.

At thousands of tokens a second the encoding counts, so all that is the same in every chunk of a response is encoded
once and a chunk costs the escaping of its text.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii  # the C function; ASCII, because some clients split lines at U+2028
from typing import Any

from serving.openai.errors import APIError

DONE = b"data: [DONE]\n\n"


def error_event(error: APIError) -> bytes:
    """A failure after the status line has gone: the error object, then the end of the stream."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n" + DONE


class _Stream:
    """Chunks of one response. `include_usage`: usage is null in every chunk but those given one."""

    object: str

    def __init__(self, id: str, created: int, model: str, *, include_usage: bool = False) -> None:
        head = {"id": id, "object": self.object, "created": created, "model": model, "system_fingerprint": None}
        self._head = f'data: {json.dumps(head, separators=(",", ":"))[:-1]},"choices":['
        self._no_usage = '],"usage":null}\n\n' if include_usage else "]}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk under include_usage: no choices."""
        return f"{self._head}{self._end(usage)}".encode()

    def _chunk(
        self,
        index: int,
        payload: str,
        finish_reason: str | None,
        logprobs: dict[str, Any] | None,
        usage: dict[str, Any] | None,
    ) -> bytes:
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        tail = self._no_usage if usage is None else self._end(usage)
        shown = "null" if logprobs is None else _dumps(logprobs)
        choice = f'{{"index":{index},{payload},"logprobs":{shown},"finish_reason":{reason}}}'
        return f"{self._head}{choice}{tail}".encode()

    def _end(self, usage: dict[str, Any]) -> str:
        return f'],"usage":{_dumps(usage)}}}\n\n'


class ChatStream(_Stream):
    """chat.completion.chunk: first() once a choice, then delta(), the last one with a finish_reason."""

    object = "chat.completion.chunk"

    def first(self, index: int = 0, usage: dict[str, Any] | None = None) -> bytes:
        """Role and empty content: tells the client that the request was accepted."""
        return self._chunk(index, '"delta":{"role":"assistant","content":"","refusal":null}', None, None, usage)

    def delta(
        self,
        text: str,
        finish_reason: str | None = None,
        *,
        index: int = 0,
        logprobs: dict[str, Any] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """The next text; empty only beside a finish_reason or logprobs. usage: under continuous_usage_stats."""
        payload = f'"delta":{{"content":{encode_basestring_ascii(text)}}}' if text else '"delta":{}'
        return self._chunk(index, payload, finish_reason, logprobs, usage)


class CompletionStream(_Stream):
    """text_completion chunks: delta(), the last one of a choice with a finish_reason."""

    object = "text_completion"

    def delta(
        self,
        text: str,
        finish_reason: str | None = None,
        *,
        index: int = 0,
        logprobs: dict[str, Any] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """The next text; empty only beside a finish_reason or logprobs. usage: under continuous_usage_stats."""
        return self._chunk(index, f'"text":{encode_basestring_ascii(text)}', finish_reason, logprobs, usage)

    def ids(
        self,
        token_ids: list[int],
        finish_reason: str | None = None,
        *,
        index: int = 0,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """The next tokens where there is no tokenizer; token_ids is vLLM's addition."""
        return self._chunk(index, f'"text":"","token_ids":{_dumps(token_ids)}', finish_reason, None, usage)


def _dumps(value: dict[str, Any] | list[int]) -> str:
    return json.dumps(value, separators=(",", ":"))
