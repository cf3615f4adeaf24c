"""What is no number is passed on, by every implementation as by the definitions: a request that meets one has to end
with an error, not go on with a token that looks like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference
from tests.kernels.cases import DTYPES, Case, randn

NAN, INF = float("nan"), float("inf")
expected: dict[tuple[object, ...], torch.Tensor] = {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1003, 40000])
def test_argmax(ops: Any, size: int, dtype: torch.dtype) -> None:
    """One NaN or +infinity at any place of a row makes it -1; -infinity is a logit like others."""
    clean = randn(1, size, dtype=dtype)
    places = sorted({0, 7, 14, 15, 16, 1000, 1002, 20000, size // 2, size - 2, size - 1} & set(range(size)))
    for bad in (NAN, INF, -INF):
        rows = [clean, *(clean.index_fill(1, torch.tensor([place]), bad) for place in places)]
        rows.append(torch.full_like(clean, bad))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for logits in (torch.cat(rows), *rows):
                found = ops.argmax(logits)
                assert torch.equal(found, reference.argmax(logits))
        if bad != -INF:
            assert reference.argmax(torch.cat(rows[1:])).tolist() == [-1] * (len(rows) - 1)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_argmax_with_a_head(ops: Any, bad: float) -> None:
    hidden, weight = randn(4, 24), randn(3000, 24, seed=1)
    logits = hidden @ weight.T
    logits[1, 2999], logits[2, 0] = bad, bad
    found = ops.head_argmax(logits, hidden, weight)
    assert torch.equal(found, reference.head_argmax(logits, hidden, weight))
    assert (found >= 0).tolist() == [True, False, False, True]


def check(ops: Any, name: tuple[object, ...], case: Case, window: int = 0) -> torch.Tensor:
    """The same elements are no numbers as by the definition, computed once for a name; others are equal."""
    if name not in expected:
        wide = (case.q.float(), case.k_cache.float(), case.v_cache.float())
        expected[name] = reference.attention(*wide, case.meta, case.scale, window)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = ops.attention(case.q, case.k_cache, case.v_cache, case.meta, case.scale, window)
        torch.testing.assert_close(out.float(), expected[name], rtol=2**-7, atol=2**-7, equal_nan=True)
    return expected[name].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_attention(ops: Any, bad: float, part: str, head_dim: int, dtype: torch.dtype) -> None:
    """One bad number, at borders of tiles and segments, and at the last token, which earlier ones do not see."""
    for place in (0, 15, 256, 299):
        for queries in (1, 30):
            case = Case([1, queries], [9, 300], 4, 2, head_dim, dtype=dtype)
            if part == "q":
                case.q[-1, 1, 3] = bad
            else:
                cache = case.k_cache if part == "k" else case.v_cache
                cache[case.meta.block_tables[1, place // 16], place % 16, 0, 3] = bad
            name = (bad, part, head_dim, dtype, place, queries)
            finite = check(ops, (*name, 0), case)
            assert finite[0].all() and (part == "k" or not finite.all())  # a key may just have weight 0
            if part != "q" and queries > 1:
                check(ops, (*name, 20), case, 20)


@pytest.mark.parametrize("queries", [1, 30])
def test_attention_without_a_finite_score(ops: Any, queries: int) -> None:
    """Scores that all are -infinity have no softmax; as long as some are not, those do not count."""
    for places in (range(300), range(290), range(16), range(256, 290), range(299, 300)):
        case = Case([queries], [300], 4, 2, 64)
        case.q[:, :, 0] = 1
        for place in places:
            case.k_cache[case.meta.block_tables[0, place // 16], place % 16, 0, 0] = -INF
        finite = check(ops, (queries, places), case)
        assert finite[-1].all() == (len(places) < 300)
        if len(places) == 16:
            case.v_cache[case.meta.block_tables[0, 0], 3, 0, 5] = NAN  # its weight is 0: no number all the same
            assert not check(ops, (queries, "value"), case)[-1].all()
