"""Tokens of one sequence to text, one at a time.

Three facts shape it. A token is a run of bytes, so a character may be complete only tokens later: text is emitted in
whole code points. A stop string may lie across tokens, so text that could begin one is held back. And what was
emitted cannot be taken back, so the cut must be known before: stop strings are looked for after every token, however
many tokens a step or a network chunk brought.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer
from serving.text.stop_strings import StopStrings

_utf8 = codecs.getincrementaldecoder("utf-8")
_LONGEST_CODE_POINT = 4  # bytes


class Detokenizer:
    """The text of one output. concat(push(token) ..., finish()) == decode(all tokens), cut at the first stop string.

    The caller does not push the token that ended the sequence (EOS or one of stop_token_ids), unless the request
    asks to see it. Each push costs the length of the token, never that of the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stops = StopStrings(list(stop)) if stop else None
        self._include_stop = include_stop_str_in_output
        self._held = ""  # decoded, may begin a stop string
        self._decoder = _utf8("replace")
        self._prompt_tail = self._incomplete_end(prompt_ids)
        self._decoder.decode(self._prompt_tail)
        self.stop_reason: str | None = None  # the stop string found
        self.length = 0  # characters decoded so far, held ones included: the text offset of the next token

    @property
    def stopped(self) -> bool:
        """A stop string was found: the text is over, whatever is pushed later."""
        return self.stop_reason is not None

    def push(self, token_id: int) -> str:
        """Take the next token; the new text that is safe to emit, often empty."""
        if self.stop_reason is not None or token_id in self._skipped:
            return ""
        data = self._token_bytes(token_id)
        if self._prompt_tail and data:
            self._leave_prompt(data)
        text = self._decoder.decode(data)
        self.length += len(text)
        return self._emit(text) if self._stops and text else text

    def finish(self) -> str:
        """The rest of the text: what was held back, and U+FFFD for a character that was never completed."""
        if self.stop_reason is not None:
            return ""
        text = "" if self._prompt_tail else self._decoder.decode(b"", True)
        self._prompt_tail = b""
        self._decoder.reset()
        self.length += len(text)
        if self._stops:
            text = self._emit(text)
            text += self._held if self.stop_reason is None else ""
            self._held = ""
        return text

    def _emit(self, text: str) -> str:
        assert self._stops is not None
        found = self._stops.feed(text)
        if found is not None:
            self.stop_reason, taken = found
            text = self._held + text[:taken]
            self._held = ""
            return text if self._include_stop else text[: len(text) - len(self.stop_reason)]
        if self._include_stop:  # a stop string will be shown in any case: no need to wait for its end
            return text
        text = self._held + text
        safe = len(text) - self._stops.pending
        self._held = text[safe:]
        return text[:safe]

    def _incomplete_end(self, prompt_ids: Sequence[int]) -> bytes:
        """The bytes of an unfinished character at the end of a prompt of token ids, which the output may finish."""
        tail = b""
        for token_id in reversed(prompt_ids[-_LONGEST_CODE_POINT:]):
            tail = (b"" if token_id in self._skipped else self._token_bytes(token_id)) + tail
        decoder = _utf8("replace")
        decoder.decode(tail[-_LONGEST_CODE_POINT:])
        return decoder.getstate()[0]

    def _leave_prompt(self, data: bytes) -> None:
        """First bytes of the output: when they do not continue the prompt's character, it is not ours to emit."""
        probe = _utf8("replace")
        if probe.decode(self._prompt_tail + data[:1]).startswith("\ufffd"):
            self._decoder.reset()
        self._prompt_tail = b""
