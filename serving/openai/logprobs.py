"""Logprobs in the two shapes of OpenAI's API.

Every token counts, also one whose text is skipped (special tokens) or cut off by a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.step import TokenLogprobs
from engine.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -Infinity


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}, one entry a token."""
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        logprob, top = (entry.logprob, entry.top) if entry is not None else (LOWEST, [])
        alternatives = [_chat_token(tokenizer, other, value) for other, value in top]
        content.append(_chat_token(tokenizer, token_id, logprob) | {"top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    text_offsets: Sequence[int],
) -> dict[str, Any]:
    """{tokens, token_logprobs, top_logprobs, text_offset}, parallel lists.

    `text_offsets`: `Detokenizer.length` before each token was pushed. top_logprobs holds the sampled token too, so it
    may have one entry more than asked for; it is null when none were asked for.
    """
    tokens, values, tops = [], [], []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text = _completion_token(tokenizer, token_id)
        logprob, top = (entry.logprob, entry.top) if entry is not None else (LOWEST, [])
        tokens.append(text)
        values.append(_finite(logprob))
        alternatives = {_completion_token(tokenizer, other): _finite(value) for other, value in top}
        tops.append(alternatives | {text: _finite(logprob)} if alternatives else None)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if any(tops) else None,
        "text_offset": list(text_offsets),
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _completion_token(tokenizer: Tokenizer, token_id: int) -> str:
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:  # OpenAI's spelling; U+FFFD would make different tokens the same key
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
