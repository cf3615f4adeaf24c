"""The bytes a token stands for.

A token of a byte-level or byte-fallback vocabulary is a run of bytes, not of characters: an emoji may be split over
four tokens. Text is therefore made by joining bytes and decoding UTF-8 once, never by joining decoded tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable character for each byte, as {code point: byte}."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(rest)}


_ALPHABET = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """'Ġhello' -> b' hello'. A token written outside the alphabet (an added one) is its own UTF-8."""
    try:
        return bytes([_ALPHABET[ord(char)] for char in token])
    except KeyError:
        return token.encode()


def byte_fallback(token: str) -> bytes:
    """'▁hello' -> b' hello', '<0x0A>' -> b'\\n'."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()


def converter(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """`byte_level` or `byte_fallback`, whichever the tokenizer's decoder is.

    Raises ValueError naming the decoder when it is neither.
    """
    state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {"type": "none"}
    kinds = [part["type"] for part in state.get("decoders", [state])]
    if "ByteLevel" in kinds:
        return byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return byte_fallback
    raise ValueError(f"tokenizer decoder {'+'.join(kinds)} is not supported, must be ByteLevel or ByteFallback")
