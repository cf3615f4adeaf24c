"""Text to token ids and back, for a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from engine.gguf_file import GGUFFile
from engine.text import gguf_tokenizer, token_bytes
from engine.text.chat_template import ChatTemplate
from engine.text.convert import SPECIAL_NAMES, convert

_OLDER_FORMATS = ("vocab.json", "vocab.txt", "*.model", "*.tiktoken")


@dataclass
class Tokenizer:
    """One model's tokenizer. Safe to share between threads and requests.

    Text is the UTF-8 of the tokens' bytes; bytes that are no UTF-8 become U+FFFD, one per maximal invalid run.
    """

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...]  # every id that ends a sequence, the tokenizer's own first; empty: none known
    bos_token_id: int | None
    chat_template: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)  # "eos_token" -> its text, seen by the template

    def __post_init__(self) -> None:
        self._to_bytes = token_bytes.converter(self.backend)
        self._bytes: dict[int, bytes] = {}  # filled as tokens are met
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        # an added token's text is literal: it must not pass through the byte alphabet
        self._bytes.update({index: token.content.encode() for index, token in added.items()})
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=1)  # characters; of the byte alphabet: bytes

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written in the text are parsed; add_special_tokens adds BOS where the model does.

        Raises ValueError for text that is not valid Unicode (lone surrogates).
        """
        try:
            # Unlike encode, the batch call lets go of the GIL: a long text in a thread holds up nobody.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError("text is not valid Unicode: it holds a lone surrogate") from error

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of some tokens; ids beyond the vocabulary (padding rows of the model) are empty.

        A SentencePiece tokenizer's space before a word is kept: an output goes on from its prompt.
        """
        skip = self.special_ids if skip_special_tokens else frozenset()
        return b"".join([self.token_bytes(index) for index in ids if index not in skip]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text, special tokens as written; empty for an id beyond the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            token = self.backend.id_to_token(token_id)  # None: a gap in the vocabulary
            data = self._bytes[token_id] = self._to_bytes(token) if token is not None else b""
        return data

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling, such as 'Ġhello'; None for an id beyond the vocabulary."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ValueError("this model has no chat template: use /v1/completions")
        return ChatTemplate(self.chat_template)

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt text of a conversation; kwargs are variables of the template.

        Raises ValueError with one line when there is no template or it refuses the messages.
        """
        variables = {"tools": None, "documents": None, **self.special_tokens, **kwargs}
        variables.update(messages=messages, add_generation_prompt=add_generation_prompt)
        return self._template.render(variables)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation.

        The whole rendered text is encoded with special tokens parsed, as every peer does: a user who writes
        `<|im_end|>` in a message ends the turn. No BOS is added, the template writes its own.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, **kwargs), add_special_tokens=False)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or of a .gguf file.

    Raises FileNotFoundError or ValueError with one line naming the path and what is wrong.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist, must be a model directory or a .gguf file")
    if path.is_dir():
        return _from_directory(path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    raise ValueError(f"{path} is neither a model directory nor a .gguf file")


def _from_gguf(path: Path) -> Tokenizer:
    metadata = GGUFFile(path).metadata
    backend = gguf_tokenizer.from_metadata(path.name, metadata)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in [*names, "eot"]}
    special = {}
    for kind, name in names.items():
        index = ids[kind]
        if index is not None and (token := backend.id_to_token(index)) is not None:
            special[name] = token
    return Tokenizer(
        backend=backend,
        eos_token_ids=_unique([ids["eos"], ids["eot"]]),
        bos_token_id=ids["bos"],
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=special,
    )


def _from_directory(path: Path) -> Tokenizer:
    config = _read_json(path / "tokenizer_config.json")
    if (path / "tokenizer.json").exists():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        special = {name: text for name in SPECIAL_NAMES if (text := _token_text(config.get(name)))}
    elif not any(any(path.glob(pattern)) for pattern in _OLDER_FORMATS):
        raise ValueError(f"{path} has no tokenizer: neither tokenizer.json nor {', '.join(_OLDER_FORMATS)}")
    else:
        converted, special = convert(path)
        backend = tokenizers.Tokenizer.from_str(converted)
    # truncation and padding set in the file are leftovers of training
    backend.no_truncation()
    backend.no_padding()
    bos, eos = (backend.token_to_id(special[name]) if name in special else None for name in ("bos_token", "eos_token"))
    generation_eos = _read_json(path / "generation_config.json").get("eos_token_id")
    more = generation_eos if isinstance(generation_eos, list) else [generation_eos]
    return Tokenizer(
        backend=backend,
        eos_token_ids=_unique([eos, *more]),
        bos_token_id=bos,
        chat_template=_chat_template(path, config),
        special_tokens=special,
    )


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def _unique(ids: list[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(index for index in ids if index is not None))
