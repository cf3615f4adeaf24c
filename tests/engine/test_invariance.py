"""Linear layers that give a row the same bits in any batch, at the shapes of a real model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import LLM, SamplingParams
from engine.engine import Engine
from engine.layers import invariance
from engine.layers.invariance import BATCHES, is_invariant, make_invariant, rounding_of, sizes_checked
from engine.layers.linear import FIXED_ROWS, Linear, can_pack
from kernels import dispatch

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
    outcome = make_invariant(nn.Sequential(layer), 256, 64)
    assert (outcome.mended, outcome.invariant) == (((8, 8),) if below > 2 else (), True)
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


class Placed(Linear):
    """Rows come out differently from a place in the batch on."""

    def __init__(self, first: int, out_features: int = 8, in_features: int = 8):
        super().__init__(in_features, out_features)
        self.first = first
        self.sizes: list[int] = []

    def _multiply(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        out = torch.zeros(len(x), len(self.weight), dtype=torch.bfloat16)
        out[:, :8] = x[:, :8]
        out[self.first :] += 1
        return out


@pytest.mark.parametrize("first", [1, 5, 33, 300, 511, 2047, 2999])
def test_every_row_of_the_largest_batches_is_compared(first: int) -> None:
    for out_features, in_features in ((8, 8), (30_000, 8000)):
        layer = Placed(first, out_features, in_features)
        layer.weight = nn.Parameter(torch.empty(1).bfloat16().expand(out_features, in_features), requires_grad=False)
        assert not is_invariant(layer, 3000)
        layer.first = 3000
        assert is_invariant(layer, 3000)


@pytest.mark.parametrize("shape", [(4096, 14_336), (28_672, 4096), (128_256, 4096)])
@pytest.mark.parametrize("limit", [128, 2048, 3000])
def test_of_large_layers_few_sizes_are_checked_with_the_largest(shape: tuple[int, int], limit: int) -> None:
    sizes = sizes_checked(shape, limit)
    assert sizes[-1] == limit and sizes == sorted(set(sizes))
    assert {1, 2, 8, 16, 17, 33, 65} <= set(sizes) and (limit < 511 or {129, 511} <= set(sizes))
    assert sum(sizes) < 2 * limit + 1000
    assert sizes_checked((576, 1536), limit) == sorted({*(size for size in BATCHES if size < limit), 15, 16, 17, limit})


def test_sizes_left_out_are_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "WORK_LIMIT", 0)
    with caplog.at_level(logging.INFO, "ferry.engine"):
        make_invariant(nn.Sequential(linear(16, 8, seed=1)), 64, 64)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and said[0].startswith("linear (16, 8) is large: not checked for batches of 6, 7, 9, ")
    assert said[0].endswith(", 512, 1024 rows")
    caplog.clear()
    monkeypatch.undo()
    with caplog.at_level(logging.INFO, "ferry.engine"):
        make_invariant(nn.Sequential(linear(16, 8, seed=1)), 64, 64)
    assert not caplog.records


def test_a_layer_that_nothing_mends_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    layer = Placed(3)
    outcome = make_invariant(nn.Sequential(linear(16, 8, seed=1), layer), 256, 64)
    assert (outcome.mended, outcome.dependent, outcome.invariant) == ((), ((8, 8),), False)
    assert (layer.min_rows, layer.fixed_rows) == (2, False)
    assert "linear (8, 8) depends on the batch here, even in tiles of 16 rows" in caplog.text


def engine_of(path: Path, **options: Any) -> Engine:
    return LLM(str(path), dtype="bfloat16", max_model_len=64, swap_space=0, **options).engine


PROMISED = dispatch.transposed_keys(torch.device("cpu"), torch.bfloat16)  # else torch's kernels promise tokens only


def test_batch_invariant_false_mends_nothing_and_says_so(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a processor where every shape fails the check: tiles with the option, the plain product without it."""
    monkeypatch.setattr(invariance, "is_invariant", lambda layer, rows: layer.fixed_rows)
    sizes: list[int] = []
    multiply = Linear._multiply
    monkeypatch.setattr(Linear, "_multiply", lambda self, x: sizes.append(len(x)) or multiply(self, x))
    keys = []
    kept = "batch_invariant on, 5 shapes" if PROMISED else "batch_invariant not kept, 5 shapes"
    for option, said in ((True, kept), (False, "batch_invariant off")):
        caplog.clear()
        with caplog.at_level(logging.INFO, "ferry.engine"):
            engine = engine_of(tiny_llama, batch_invariant=option)
        assert said in caplog.text
        assert engine.reproducible == (option and PROMISED)
        sizes.clear()
        engine.add_request("r", [1, 2, 3, 4, 5], SamplingParams(max_tokens=3, ignore_eos=True))
        while engine.has_work:
            engine.step()
        assert set(sizes) == ({FIXED_ROWS} if option else {5, 1})
        keys.append(engine.compat_key)
    assert (keys[0] != keys[1]) == PROMISED  # their KV differs in its last bits


def test_an_engine_whose_layers_cannot_be_mended_promises_nothing_and_says_so(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sound = engine_of(tiny_llama)
    monkeypatch.setattr(invariance, "is_invariant", lambda layer, rows: False)
    with caplog.at_level(logging.INFO, "ferry.engine"):
        engine = engine_of(tiny_llama)
    assert not engine.reproducible
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings[-1].startswith("batch_invariant is not kept by 5 shapes of linear layers: a token's bits may")
    assert "batch_invariant not kept, 0 shapes of linear layers mended" in caplog.text
    assert engine.compat_key == engine_of(tiny_llama, batch_invariant=False).compat_key
    assert (engine.compat_key != sound.compat_key) == PROMISED
