"""What an engine says of itself to the manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llumnix.load import LoadReport

if TYPE_CHECKING:
    from serving.engine_node import EngineNode

OF_STATS = (
    *("total_blocks", "free_blocks", "cached_blocks", "waiting_blocks", "head_blocks"),
    *("running", "waiting", "seats"),
    *("high_running", "reserved_blocks"),
    *("queued_prefill_tokens", "prefill_tokens_per_s", "step_seconds"),
)


def load_report(node: EngineNode, sequence: int) -> LoadReport:
    """The report of that number; one of an engine that still starts has no load."""
    stats = node.thread.stats
    return LoadReport(
        node.id,
        node.incarnation,
        sequence,
        state=node.state,
        phase=node.phase,
        compat_key=node.compat_key,
        stalled_s=node.thread.stalled_s(),
        max_model_len=node.max_model_len,
        block_size=node.config.block_size,
        role=node.role,
        movable=node.movable,
        prefix=node.prefix,
        **({name: getattr(stats, name) for name in OF_STATS} if stats is not None else {}),
    )
