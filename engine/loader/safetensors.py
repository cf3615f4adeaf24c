"""Weights of a directory of safetensors files, mapped into memory and read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

INDEX = "model.safetensors.index.json"


def iterate(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Pairs of name and tensor of all shards. Raises ValueError naming a missing or damaged file."""
    from safetensors import SafetensorError, safe_open

    for file in files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}") from None


def files(path: Path) -> list[Path]:
    """The files the index names, or without an index every safetensors file."""
    index = path / INDEX
    if index.exists():
        found = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        for file in found:
            if not file.exists():
                raise ValueError(f"{file} does not exist, {INDEX} names it")
        return found
    return sorted(path.glob("*.safetensors"))
