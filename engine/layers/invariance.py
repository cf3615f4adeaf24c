"""A check, on this machine, that a linear layer gives a row the same bits in any batch.

A matrix product may sum in another order when it has another number of rows; then a token could depend on the batch
it was computed in, and a moved, resumed or replayed request on where that happened. Such differences are rare (one
element in ten thousand), so whole results are compared: at start every distinct shape is multiplied with batches of
many sizes, at one thread and at all of them; the largest batches of very large layers are left out.

A shape that fails is mended by the cheapest way that passes the same check: batches of fewer than `min_rows` rows are
padded with zeros to that many; else every product runs in tiles of FIXED_ROWS rows, so that all have the same size.
"""

from __future__ import annotations

import logging
from hashlib import blake2b

import torch
from torch import nn

from engine.layers.linear import FIXED_ROWS, Linear

logger = logging.getLogger("ferry.engine")

BATCHES = (*range(1, 36), 48, 63, 64, 65, 96, 127, 128, 129, 255, 256, 511, 512, 1024, 2048, 4096, 8192)
COMPARED_ROWS = 192  # of every batch, from its start; each is also computed alone
WORK_LIMIT = 4e10  # multiply-adds a shape
PAIR = 2  # oneDNN's product of one row differs from that of many where K is large, in so few elements that a check of
# random data may miss it; a pair costs no more than a row, so nothing is ever multiplied alone
CHECKED_ROWS, CHECKED_LOGITS_ROWS = 2048, 128  # at least, whatever an engine's limits: equal models, equal outcomes


@torch.inference_mode()
def make_invariant(model: nn.Module, max_rows: int, max_logits_rows: int) -> int:
    """Check every distinct linear layer for batches up to max_rows (the head: max_logits_rows), mend those that fail.

    Single rows are multiplied as pairs in any case. Returns how many shapes had to be mended beyond that. For bfloat16
    and float16: float32 promises tokens, not bits.
    """
    by_shape: dict[tuple[object, ...], list[Linear]] = {}
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        if isinstance(module, Linear):
            module.min_rows = PAIR
            by_shape.setdefault((*module.weight.shape, module.bias is not None, module is head), []).append(module)
    mended = 0
    for (*shape, _, is_head), layers in by_shape.items():
        limit = max(max_logits_rows, CHECKED_LOGITS_ROWS) if is_head else max(max_rows, CHECKED_ROWS)
        if is_invariant(layers[0], limit):
            continue
        mended += 1
        how = _mend(layers[0], limit)
        for layer in layers:
            layer.min_rows, layer.fixed_rows = layers[0].min_rows, layers[0].fixed_rows
        logger.info("linear %s depends on the batch here: %s", tuple(shape), how)
    return mended


def rounding_of(model: nn.Module) -> str:
    """How the linear layers multiply, as a key: engines with unequal ones may differ in the last bits."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    ways = sorted({(*module.weight.shape, module.min_rows, module.fixed_rows) for module in linears})
    return blake2b(repr(ways).encode(), digest_size=4).hexdigest()


def _mend(layer: Linear, max_rows: int) -> str:
    layer.min_rows = FIXED_ROWS
    if is_invariant(layer, max_rows):
        return f"batches below {FIXED_ROWS} rows are padded"
    layer.min_rows, layer.fixed_rows = 1, True
    if is_invariant(layer, 2 * FIXED_ROWS + 1):
        return f"it runs in tiles of {FIXED_ROWS} rows"
    logger.warning("a linear layer depends on the batch even in tiles of %d rows: tokens may, too", FIXED_ROWS)
    return f"also in tiles of {FIXED_ROWS} rows"


def is_invariant(layer: Linear, max_rows: int) -> bool:
    """Whether the rows of random batches equal, bit for bit, the same rows alone."""
    out_features, in_features = layer.weight.shape
    compared = max(2, min(COMPARED_ROWS, max_rows, int(WORK_LIMIT / 4 / (out_features * in_features))))
    batches, work = [], 0
    for rows in BATCHES:
        work += rows * out_features * in_features
        if rows <= max_rows and (work <= WORK_LIMIT or rows <= FIXED_ROWS + 1):
            batches.append(rows)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(batches[-1], compared), in_features, generator=generator).to(layer.weight.dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([layer(x[row : row + 1]) for row in range(compared)])
        for count in {1, threads}:
            torch.set_num_threads(count)
            for rows in batches:
                if not torch.equal(layer(x[:rows])[:compared], alone[: min(rows, compared)]):
                    return False
    finally:
        torch.set_num_threads(threads)
    return True
