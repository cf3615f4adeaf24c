"""A check, on this machine, that a linear layer gives a row the same bits in any batch.

A matrix product may sum in another order when it has another number of rows; then a token could depend on the batch
it was computed in, and a moved, resumed or replayed request on where that happened. So at start every distinct shape
is multiplied with batches of many sizes, around those where libraries change their ways, at one thread and at all of
them; the largest batches of very large layers are left out. A shape that fails runs in fixed tiles of
FIXED_ROWS rows from then on, padded with zeros: then every product has the same size.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from engine.layers.linear import FIXED_ROWS, Linear

logger = logging.getLogger("ferry.engine")

BATCHES = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    12,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    255,
    256,
    511,
    512,
)
LARGE_BATCHES = (1024, 2048, 4096, 8192)
WORK_LIMIT = 1e11  # multiply-adds a shape: the largest batches of very large layers are left out


@torch.inference_mode()
def make_invariant(model: nn.Module, max_rows: int, max_logits_rows: int) -> int:
    """Check every distinct linear layer for batches up to max_rows (the head: max_logits_rows), mend those that fail.

    Returns how many shapes had to be mended. For bfloat16 and float16: float32 promises tokens, not bits.
    """
    by_shape: dict[tuple[object, ...], list[Linear]] = {}
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        if isinstance(module, Linear):
            by_shape.setdefault((*module.weight.shape, module.bias is not None, module is head), []).append(module)
    mended = 0
    for (*shape, _, is_head), layers in by_shape.items():
        if is_invariant(layers[0], max_logits_rows if is_head else max_rows):
            continue
        mended += 1
        for layer in layers:
            layer.fixed_rows = True
        logger.info("linear %s depends on the batch here: it runs in tiles of %d rows", tuple(shape), FIXED_ROWS)
        if not is_invariant(layers[0], 2 * FIXED_ROWS + 1):
            logger.warning("linear %s depends on the batch even in fixed tiles: tokens may, too", tuple(shape))
    return mended


def is_invariant(layer: Linear, max_rows: int) -> bool:
    """Whether rows of random batches equal, bit for bit, the same rows alone."""
    out_features, in_features = layer.weight.shape
    batches, work = [1], 0
    for rows in (*BATCHES[1:], *LARGE_BATCHES):
        work += rows * out_features * in_features
        if rows <= max_rows and (work <= WORK_LIMIT or rows <= 16):
            batches.append(rows)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batches[-1], in_features, generator=generator).to(layer.weight.dtype)
    probes = sorted({0, 1, batches[-1] // 2, batches[-1] - 1})
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = {row: layer(x[row : row + 1]) for row in probes}
        for count in {1, threads}:
            torch.set_num_threads(count)
            if not all(_rows_agree(layer, x, rows, alone) for rows in batches):
                return False
    finally:
        torch.set_num_threads(threads)
    return True


def _rows_agree(layer: Linear, x: Tensor, rows: int, alone: dict[int, Tensor]) -> bool:
    """The probed rows inside the batch of the first `rows` rows, and at its end."""
    batch = layer(x[:rows])
    if not all(torch.equal(batch[row], expected[0]) for row, expected in alone.items() if row < rows):
        return False
    last = layer(x[len(x) - rows :])
    return torch.equal(last[-1], alone[len(x) - 1][0])
