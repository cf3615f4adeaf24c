"""Converts a tokenizer of an older format to `tokenizers` JSON: python convert.py DIRECTORY OUTPUT

A program of its own, because transformers' AutoTokenizer imports torch, which the front
end does not need and would carry for its whole life.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
TIMEOUT_S = 120


def convert(directory: Path) -> tuple[str, dict[str, str]]:
    """The tokenizer's JSON and its special tokens by name. Raises ValueError with one line."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "tokenizer.json"
        # -P: the directory of this file stays off the import path
        command = [sys.executable, "-P", __file__, str(directory), str(output)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{directory} has no tokenizer.json and took over {TIMEOUT_S} s to convert") from error
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ValueError(f"{directory} has no tokenizer.json and transformers cannot convert it: {reason}")
        data: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return data["tokenizer"], data["special_tokens"]


def main(directory: str, output: str) -> None:
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        sys.exit(f"{type(converted).__name__} has no form that the tokenizers library knows")
    special = {name: str(text) for name in SPECIAL_NAMES if (text := getattr(converted, name, None))}
    data = {"tokenizer": backend.to_str(), "special_tokens": special}
    Path(output).write_text(json.dumps(data), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
