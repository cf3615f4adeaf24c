"""How torch's attention divides a batch: groups of decodes, tiles of a chunk."""

from __future__ import annotations

import importlib

import pytest
import torch

from kernels.cpu import torch_ops
from tests.kernels.cases import Case

attention_module = importlib.import_module("kernels.cpu.torch_attention")  # the package's name for it is the function


def test_long_chunks_are_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "QUERY_TILE", 5)
    Case([17], [23], 4, 2, 16, 4).check(torch_ops)


def test_decodes_are_grouped_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([1] * 5, [4, 64, 60, 5, 17], 4, 2, 16, 4)
    groups = attention_module._make_groups(case.meta, 2)
    assert [torch.arange(5)[group.rows].tolist() for group in groups] == [[1, 2], [4], [0, 3]]
    monkeypatch.setattr(attention_module, "GATHER_TOKENS", 64)
    assert len(attention_module._make_groups(case.meta, 2)) == 4
    case.check(torch_ops)
