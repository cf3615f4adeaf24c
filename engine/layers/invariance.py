"""A check, on this machine, that a linear layer gives a row the same bits in any batch.

A matrix product may sum in another order when it has another number of rows; then a token could depend on the batch
it was computed in, and a moved, resumed or replayed request on where that happened. Such differences are rare (one
element in ten thousand), so whole results are compared: at start every distinct shape is multiplied with batches of
many sizes, at one thread and at all of them. Of large layers fewer sizes are checked, the largest always among them.

A shape that fails is mended by the cheapest way that passes the same check: batches of fewer than `min_rows` rows are
padded with zeros to that many; else every product runs in tiles of FIXED_ROWS rows, so that all have the same size.
Where that fails, too, the layer is left as it is, and nothing is promised.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn

from engine.layers.linear import FIXED_ROWS, Linear

logger = logging.getLogger("ferry.engine")

Shape = tuple[int, int]  # out_features, in_features

BATCHES = (*range(1, 36), 48, 63, 64, 65, 96, 127, 128, 129, 255, 256, 511, 512, 1024, 2048, 4096, 8192)
ESSENTIAL = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 65, 129, 511)
"""Checked of every shape, with the largest: few rows, many, and one more or less than blocks of a product have."""
COMPARED_ROWS = 192  # distinct rows; a batch repeats them, and all its rows are compared
COMPARED_WORK = 3e9  # multiply-adds that may go into computing those alone
WORK_LIMIT = 4e10  # multiply-adds a shape; the essential sizes may take more
PAIR = 2  # oneDNN's product of one row differs from that of many where K is large, in so few elements that a check of
# random data may miss it; a pair costs no more than a row, so nothing is ever multiplied alone
CHECKED_ROWS, CHECKED_LOGITS_ROWS = 2048, 128  # at least, whatever an engine's limits: equal models, equal outcomes


@dataclass(frozen=True)
class Outcome:
    """Shapes that had to be mended beyond multiplying single rows as pairs, and those that nothing mends."""

    mended: tuple[Shape, ...] = ()
    dependent: tuple[Shape, ...] = ()

    @property
    def invariant(self) -> bool:
        return not self.dependent


@torch.inference_mode()
def make_invariant(model: nn.Module, max_rows: int, max_logits_rows: int) -> Outcome:
    """Check every distinct linear layer for batches up to max_rows (the head: max_logits_rows), mend those that fail.

    Single rows are multiplied as pairs in any case. For bfloat16 and float16: float32 promises tokens, not bits.
    """
    by_shape: dict[tuple[Shape, bool, bool], list[Linear]] = {}
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        if isinstance(module, Linear):
            module.min_rows = PAIR
            by_shape.setdefault((_shape(module), module.bias is not None, module is head), []).append(module)
    mended, dependent = [], []
    for (shape, _, is_head), layers in by_shape.items():
        limit = max(max_logits_rows, CHECKED_LOGITS_ROWS) if is_head else max(max_rows, CHECKED_ROWS)
        if left_out := sorted({size for size in BATCHES if size < limit} - set(sizes_checked(shape, limit))):
            text = ", ".join(map(str, left_out))
            logger.info("linear %s is large: not checked for batches of %s rows", shape, text)
        if is_invariant(layers[0], limit):
            continue
        how = _mend(layers[0], limit)
        for layer in layers:
            layer.min_rows, layer.fixed_rows = layers[0].min_rows, layers[0].fixed_rows
        if how:
            mended.append(shape)
            logger.info("linear %s depends on the batch here: %s", shape, how)
        else:
            dependent.append(shape)
            logger.warning("linear %s depends on the batch here, even in tiles of %d rows", shape, FIXED_ROWS)
    return Outcome(tuple(mended), tuple(dependent))


def rounding_of(model: nn.Module) -> str:
    """How the linear layers multiply, as a key: engines with unequal ones may differ in the last bits."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    ways = sorted({(*module.weight.shape, module.min_rows, module.fixed_rows) for module in linears})
    return blake2b(repr(ways).encode(), digest_size=4).hexdigest()


def sizes_checked(shape: Shape, max_rows: int) -> list[int]:
    """Ascending sizes of the batches that are checked: the essential ones and max_rows, and of the others, the
    smallest first, as many as WORK_LIMIT allows."""
    sizes = {size for size in ESSENTIAL if size <= max_rows} | {max_rows}
    work = sum(sizes) * shape[0] * shape[1]
    for size in BATCHES:
        if size < max_rows and size not in sizes:
            work += size * shape[0] * shape[1]
            if work <= WORK_LIMIT:
                sizes.add(size)
    return sorted(sizes)


def is_invariant(layer: Linear, max_rows: int) -> bool:
    """Whether the rows of random batches equal, bit for bit, the same rows alone.

    Alone means at one thread, so engines with any numbers of threads that pass have equal results. The batches are
    multiplied with all threads, and with one as well where WORK_LIMIT lets all sizes be checked.
    """
    shape = _shape(layer)
    sizes = sizes_checked(shape, max_rows)
    distinct = int(min(COMPARED_ROWS, max(16, COMPARED_WORK / (shape[0] * shape[1]))))
    rows = torch.randn(distinct, shape[1], generator=torch.Generator().manual_seed(0)).to(layer.weight.dtype)
    x = rows.repeat(-(-max_rows // distinct), 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([layer(row) for row in rows.split(1)])
        few = sum(sizes) * shape[0] * shape[1] <= WORK_LIMIT
        for count in {threads, 1} if few else {threads}:
            torch.set_num_threads(count)
            for size in sizes:
                if not _repeats(layer(x[:size]), alone):
                    return False
    finally:
        torch.set_num_threads(threads)
    return True


def _repeats(found: Tensor, rows: Tensor) -> bool:
    """Whether `found` is `rows` again and again, the last time perhaps in part."""
    return all(torch.equal(part, rows[: len(part)]) for part in found.split(len(rows)))


def _mend(layer: Linear, max_rows: int) -> str:
    """What was done; empty when nothing helps."""
    layer.min_rows = FIXED_ROWS
    if is_invariant(layer, max_rows):
        return f"batches below {FIXED_ROWS} rows are padded"
    layer.min_rows, layer.fixed_rows = 1, True
    if is_invariant(layer, 2 * FIXED_ROWS + 1):
        return f"it runs in tiles of {FIXED_ROWS} rows"
    layer.min_rows, layer.fixed_rows = PAIR, False
    return ""


def _shape(layer: Linear) -> Shape:
    out_features, in_features = layer.weight.shape
    return out_features, in_features
