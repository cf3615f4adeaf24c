"""Linear layers that give a row the same bits in any batch, at the shapes of a real model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine import LLM, SamplingParams
from engine.layers import invariance
from engine.layers.invariance import is_invariant, make_invariant, rounding_of
from engine.layers.linear import FIXED_ROWS, Linear, can_pack

pytestmark = pytest.mark.skipif(
    not can_pack(torch.empty(1, dtype=torch.bfloat16)), reason="this processor multiplies bfloat16 another way"
)


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def linear(out_features: int, in_features: int, seed: int) -> Linear:
    layer = Linear(in_features, out_features)
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed)) / in_features**0.5
    layer.weight.data = weight.bfloat16()
    layer.finish_loading()
    return layer


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(960, 576), (576, 576), (3072, 576), (576, 1536), (512, 4096)])
def test_every_row_of_every_batch_equals_the_row_alone(shape: tuple[int, int]) -> None:
    """Inputs the check itself did not see, all sizes up to 70."""
    model = nn.Sequential(linear(*shape, seed=5))
    torch.set_num_threads(2)
    make_invariant(model, 512, 64)
    x = torch.randn(500, shape[1], generator=torch.Generator().manual_seed(6)).bfloat16()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        alone = torch.cat([model(row) for row in x.split(1)])
        for rows in (*range(1, 70), 200, 500):
            assert torch.equal(model(x[:rows]), alone[:rows]), (threads, rows)
            assert torch.equal(model(x[-rows:]), alone[-rows:]), (threads, rows)


class Fickle(Linear):
    """A layer whose small (or all) products come out differently by their number of rows."""

    def __init__(self, below: int):
        super().__init__(8, 8)
        self.weight.data = torch.eye(8).bfloat16()
        self.below = below

    def _multiply(self, x: Tensor) -> Tensor:
        return x + (len(x) if len(x) < self.below else 0)


@pytest.mark.parametrize(
    ("below", "min_rows", "fixed"), [(0, 2, False), (2, 2, False), (9, FIXED_ROWS, False), (10**6, 1, True)]
)
def test_a_layer_is_mended_by_the_cheapest_way_that_works(below: int, min_rows: int, fixed: bool) -> None:
    layer = Fickle(below)
    assert make_invariant(nn.Sequential(layer), 256, 64) == (below > 2)
    assert (layer.min_rows, layer.fixed_rows) == (min_rows, fixed)
    assert is_invariant(layer, 256)


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(48, 1080), (216, 1030), (64, 2048), (576, 1536)])
@pytest.mark.parametrize("limit", [1, 16, 2048])
def test_layers_with_few_outputs_and_small_limits_are_invariant_too(shape: tuple[int, int], limit: int) -> None:
    """Where one row differs from many only in an element of thousands, a check of samples may not see it."""
    ways = set()
    for seed in range(6):
        model = nn.Sequential(linear(*shape, seed=seed))
        make_invariant(model, limit, limit)
        x = torch.randn(2000, shape[1], generator=torch.Generator().manual_seed(seed + 100)).bfloat16()
        alone = torch.cat([model(row) for row in x.split(1)])
        for rows in (2, 3, 5, 16, 33, 200, 2000):
            assert torch.equal(model(x[:rows]), alone[:rows]), (seed, rows)
        ways.add(rounding_of(model))
    assert len(ways) == 1, "engines with other limits multiply in the same way"


def test_batch_invariant_false_mends_nothing_and_says_so(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a processor where every shape fails the check: tiles with the option, the plain product without it."""
    monkeypatch.setattr(invariance, "is_invariant", lambda layer, rows: False)
    sizes: list[int] = []
    multiply = Linear._multiply
    monkeypatch.setattr(Linear, "_multiply", lambda self, x: sizes.append(len(x)) or multiply(self, x))
    keys = []
    for option, said in ((True, "batch_invariant on, 5 shapes"), (False, "batch_invariant off")):
        caplog.clear()
        with caplog.at_level(logging.INFO, "ferry.engine"):
            llm = LLM(str(tiny_llama), dtype="bfloat16", batch_invariant=option, max_model_len=64)
        assert said in caplog.text
        sizes.clear()
        llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert set(sizes) == ({FIXED_ROWS} if option else {5, 1})
        keys.append(llm.engine.compat_key)
    assert keys[0] != keys[1]  # their KV differs in its last bits
