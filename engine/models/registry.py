"""From the architecture named in a checkpoint to the class that computes it."""

from __future__ import annotations

import importlib

from torch import nn

ARCHITECTURES = {
    "LlamaForCausalLM": "engine.models.llama",
    "Qwen3ForCausalLM": "engine.models.qwen3",
}


def model_class(architecture: str) -> type[nn.Module]:
    """The model class of a Hugging Face architecture name. Raises ValueError listing the known ones."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture} is not supported, known are {', '.join(ARCHITECTURES)}")
    return getattr(importlib.import_module(ARCHITECTURES[architecture]), architecture)
