"""What the attention layers of the running step read: its metadata and the KV cache.

Set by the runner around a forward pass, so that models need no arguments beside ids and positions. One context a
thread: engines in different threads of one process do not see each other's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.metadata import AttentionMetadata


class LayerCache(Protocol):
    """The part of a KV cache that attention layers need."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer: views [num_blocks, block_size, kv_heads, head_dim]."""
        ...


@dataclass(slots=True)
class Context:
    metadata: AttentionMetadata
    kv: LayerCache


_current = threading.local()


def set_context(metadata: AttentionMetadata, kv: LayerCache) -> None:
    _current.context = Context(metadata, kv)


def get_context() -> Context:
    """The context of the step running in this thread. Raises RuntimeError outside a step."""
    context = getattr(_current, "context", None)
    if context is None:
        raise RuntimeError("no step is running in this thread, call set_context first")
    return context


def reset_context() -> None:
    _current.context = None
