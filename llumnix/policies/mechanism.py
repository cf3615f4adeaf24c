"""How a request moves: its KV is copied while it goes on, or its tokens are computed again at the destination."""

from __future__ import annotations

from dataclasses import dataclass

from llumnix.load import Movable
from llumnix.settings import DEFAULTS, LlumnixSettings

COPY = "copy"  # stages while the request decodes, then a short hold
RECOMPUTE = "recompute"  # held at once; the destination prefills what it has not cached
QUEUE = "queue"  # it waits here and will wait there: only its record moves


@dataclass(frozen=True)
class Costs:
    """Measured at the source and the destination; moving averages (of bytes_per_s weighted by bytes)."""

    block_bytes: int
    block_size: int
    bytes_per_s: float  # of a transfer; 0: not known yet
    call_s: float  # one round trip
    prefill_tokens_per_s: float  # at the destination; 0: not known yet
    step_s: float  # decode step at the source


def choose(request: Movable, costs: Costs, settings: LlumnixSettings = DEFAULTS) -> str:
    """The mechanism for a request.

    Recomputing is silence from beginning to end, a copy only in its last stage. So it is chosen only if it ends before
    the last stage would, or if it is the cheaper of the two and the silence stays below one decode step.
    """
    if request.waiting:
        return QUEUE
    if costs.prefill_tokens_per_s <= 0:
        return COPY
    recompute = recompute_s(request, costs)
    if recompute <= silence_s(costs, settings):
        return RECOMPUTE
    return RECOMPUTE if recompute < min(costs.step_s, copy_s(request, costs, settings)) else COPY


def copy_s(request: Movable, costs: Costs, settings: LlumnixSettings = DEFAULTS) -> float:
    """Seconds from the reservation to the commit of a copy, at least two stages."""
    return _transfer_s(request.blocks, costs, settings) + 3 * costs.call_s


def recompute_s(request: Movable, costs: Costs) -> float:
    """Seconds until the destination has computed the request, of which it may have nothing in its cache."""
    return request.tokens / costs.prefill_tokens_per_s + costs.call_s


def silence_s(costs: Costs, settings: LlumnixSettings = DEFAULTS) -> float:
    """Seconds a copied request is held: its last stage and the commit."""
    return _transfer_s(settings.last_stage_blocks, costs, settings) + costs.call_s


def _transfer_s(blocks: int, costs: Costs, settings: LlumnixSettings) -> float:
    limit = settings.bandwidth_mb_per_s * 1e6
    rates = [rate for rate in (limit, costs.bytes_per_s) if rate > 0]
    return blocks * costs.block_bytes / min(rates) if rates else 0.0
