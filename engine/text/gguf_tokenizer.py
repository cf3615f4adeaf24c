"""A `tokenizers.Tokenizer` from GGUF metadata, splitting text the way `tokenizer.ggml.pre` says."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

# GGUF token types
CONTROL, USER_DEFINED = 3, 4

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_WORDS + digits + _REST), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
}


def from_metadata(name: str, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE with the file's special tokens; encoding adds BOS and EOS as the file asks.

    Raises ValueError naming a tokenizer model or pre-tokenizer that is not known, or a key that is missing.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(f"{name}: tokenizer.ggml.model is {model!r}, only 'gpt2' (byte-level BPE) is supported")
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"{name}: tokenizer.ggml.pre is {pre!r}, supported are {', '.join(PRE_TOKENIZERS)}")
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if key not in metadata:
            raise ValueError(f"{name} has no {key}: it does not carry a tokenizer")

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        # Llama 3 takes a word that is in the vocabulary whole, even where no chain of merges builds it
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{name}: tokens and merges do not fit together: {error}") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # as in the model's own tokenizer.json
    types = metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_tokens(
        [
            AddedToken(tokens[index], special=kind == CONTROL, normalized=False)
            for index, kind in enumerate(types)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    _add_post_processor(tokenizer, metadata, add_bos=metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"))
    return tokenizer


def _add_post_processor(tokenizer: tokenizers.Tokenizer, metadata: dict[str, Any], add_bos: bool) -> None:
    template: list[str] = ["$A"]
    special: list[tuple[str, int]] = []
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    if add_bos and bos is not None and (token := tokenizer.id_to_token(bos)) is not None:
        special.append((token, bos))
        template.insert(0, token)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    if add_eos and eos is not None and (token := tokenizer.id_to_token(eos)) is not None:
        special.append((token, eos))
        template.append(token)
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
