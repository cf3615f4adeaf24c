"""The native CPU kernels as functions of tensors. Shapes and meaning: kernels/reference.py.

Calls go through ctypes, which lets go of the GIL, so a long prefill does not hold up the process's event loop.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import compile, torch_cache, torch_elementwise, torch_ops
from kernels.cpu.torch_attention import attention as torch_attention
from kernels.metadata import AttentionMetadata

SEGMENT = 256  # of attention_core.h
SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
P, I64, I32, F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
SIGNATURES = {  # arguments and result: 0, or not where there was no memory
    "rms_norm": ([P, I64, P, P, P, I64, I64, F32, I32], None),
    "silu_mul": ([P, P, I64, I64, I32], None),
    "rope_and_cache": ([P, I64, P, I64, P, I64, P, P, P, P, P, P, I64, I32, I32, I32, I32], None),
    "argmax": ([P, I64, P, P, P, I64, I64, I64, I32], I32),
    "attention": ([P, P, P, P, P], I32),
}


class CacheLayout(ctypes.Structure):
    """Strides of a layer's K and V, in elements (interface.h)."""

    _fields_ = [
        (name, I64)
        for name in (
            *("block_size", "block_stride", "k_head_stride", "k_token_stride", "k_dim_stride"),
            *("v_head_stride", "v_token_stride"),
        )
    ]


class AttentionCall(ctypes.Structure):
    """The arguments of attention that are the same for all layers of a step (interface.h)."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_sequences", "heads", "kv_heads", "head_dim", "window", "threads")),
        ("scale", F32),
        ("cache", CacheLayout),
        ("q_token_stride", I64),
        ("table_stride", I64),
        *((name, P) for name in ("block_tables", "query_lens", "context_lens", "query_starts")),
    ]


class NativeOps:
    """One compiled library. What it has no type or layout for goes to the torch path."""

    def __init__(self, target: str = "native"):
        library = compile.load(target)
        self.functions = _functions(library.handle)
        self.numerics = f"c-{library.build_id}-torch-{torch.__version__}"  # torch: the linear layers
        self._step = threading.local()

    def supports(self, dtype: torch.dtype) -> bool:
        return ("attention", dtype) in self.functions

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        function = self.functions.get(("rms_norm", x.dtype))
        if function is None or weight.dtype != x.dtype:
            return torch_elementwise.rms_norm(x, weight, eps)
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        size = x.shape[-1]
        function(
            *(rows.data_ptr(), rows.stride(0), None, _pointer(weight, x.dtype, size), out.data_ptr()),
            *(rows.shape[0], size, eps, _threads()),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The residual is updated in place and returned."""
        function = self.functions.get(("rms_norm", x.dtype))
        if function is None or weight.dtype != x.dtype or residual.dtype != torch.float32:
            return torch_elementwise.add_rms_norm(x, residual, weight, eps)
        x = x.contiguous()
        residual = residual.contiguous()
        out = torch.empty_like(x)
        rows, size = x.shape
        function(
            *(x.data_ptr(), size, _pointer(residual, torch.float32, rows * size)),
            *(_pointer(weight, x.dtype, size), out.data_ptr()),
            *(rows, size, eps, _threads()),
        )
        return out, residual

    def silu_mul(self, x: Tensor) -> Tensor:
        function = self.functions.get(("silu_mul", x.dtype))
        if function is None:
            return torch_elementwise.silu_mul(x)
        x = x.contiguous()
        rows, size = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, size), dtype=x.dtype)
        function(x.data_ptr(), out.data_ptr(), rows, size, _threads())
        return out

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Rotates q in place and returns it."""
        function = self.functions.get(("rope_and_cache", q.dtype))
        same = q.dtype == k.dtype == v.dtype == k_cache.dtype == v_cache.dtype
        if function is None or not same or v_cache.stride(3) != 1:
            return torch_cache.rope_and_cache(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
        q, k, v = _rows(q), _rows(k), _rows(v)
        tokens, heads, head_dim = q.shape
        layout = _layout(k_cache, v_cache)
        function(
            *(q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(_pointer(angles, torch.float32, tokens * head_dim // 2) for angles in (cos, sin)),
            *(_pointer(slot_mapping, torch.int64, tokens), k_cache.data_ptr(), v_cache.data_ptr()),
            *(ctypes.addressof(layout), tokens, heads, k.shape[1], head_dim, _threads()),
        )
        return q

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, scale: float, window: int = 0
    ) -> Tensor:
        function = self.functions.get(("attention", q.dtype))
        tile = min(16, meta.block_size)
        # Tiles must end at block and segment borders; dimensions are taken two by two
        odd = meta.block_size % tile or SEGMENT % tile or q.shape[2] % 2
        if function is None or k_cache.dtype != q.dtype or v_cache.stride(3) != 1 or odd:
            return torch_attention(q, k_cache, v_cache, meta, scale, window)
        q = _rows(q)
        call = self._call(q, k_cache, v_cache, meta, scale, window)
        out = torch.empty(q.shape, dtype=q.dtype)
        pointers = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()
        if function(ctypes.addressof(call), *pointers):
            raise MemoryError("attention: no memory for the working rows")
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        function = self.functions.get(("argmax", logits.dtype))
        if function is None or logits.stride(1) != 1:
            return torch_ops.argmax(logits)
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        pointers = (logits.data_ptr(), logits.stride(0), None, None, out.data_ptr())
        if function(*pointers, *logits.shape, 0, _threads()):
            raise MemoryError("argmax: no memory for the parts of rows")
        return out

    def head_argmax(self, logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        function = self.functions.get(("argmax", logits.dtype))
        same = logits.dtype == hidden.dtype == weight.dtype
        if function is None or not same or logits.stride(1) != 1 or not weight.is_contiguous():
            return self.argmax(logits)
        (rows, vocab), size = logits.shape, hidden.shape[1]
        hidden = hidden.contiguous()
        x, w = _pointer(hidden, logits.dtype, rows * size), _pointer(weight, logits.dtype, vocab * size)
        out = torch.empty(rows, dtype=torch.int64)
        pointers = (logits.data_ptr(), logits.stride(0), x, w, out.data_ptr())
        if function(*pointers, rows, vocab, size, _threads()):
            raise MemoryError("argmax: no memory for the parts of rows")
        return out

    def _call(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, scale: float, window: int
    ) -> AttentionCall:
        """Made at a step's first layer, kept while metadata, shapes, strides and threads stay the same."""
        shapes = q.shape[1:], q.stride(0), k_cache.shape[2], k_cache.stride(), v_cache.stride()
        key = (*shapes, scale, window, _threads())
        last = getattr(self._step, "last", None)
        if last is not None and last[0] == key and last[1] is meta:
            return last[2]
        lens = np.array([meta.query_lens, meta.context_lens], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(lens[0])[:-1]]).astype(np.int32)
        tables = meta.block_tables.contiguous()
        call = AttentionCall(
            num_sequences=lens.shape[1],
            heads=q.shape[1],
            kv_heads=k_cache.shape[2],
            head_dim=q.shape[2],
            window=window,
            threads=_threads(),
            scale=scale,
            q_token_stride=q.stride(0),
            cache=_layout(k_cache, v_cache),
            table_stride=tables.stride(0),
            block_tables=_pointer(tables, torch.int32, lens.shape[1] * tables.shape[1]),
            query_lens=lens[0].ctypes.data,
            context_lens=lens[1].ctypes.data,
            query_starts=starts.ctypes.data,
        )
        self._step.last = (key, meta, call, lens, starts, tables)  # the arrays live as long as the call
        return call


def _functions(library: ctypes.CDLL) -> dict[tuple[str, torch.dtype], Any]:
    """The kernels by name and type; float16's are missing where the compiler has no such type.

    Raises Unavailable when the library has not those of interface.h: it is of another version.
    """
    functions = {}
    for dtype, suffix in SUFFIX.items():
        names = [f"{name}_{suffix}" for name in SIGNATURES]
        missing = [name for name in names if not hasattr(library, name)]
        if dtype == torch.float16 and len(missing) == len(names):
            continue
        if missing:
            raise compile.Unavailable(f"{library._name} has no {', '.join(missing)}: remove it, it is made again")
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, result
            functions[name, dtype] = function
    return functions


def _pointer(x: Tensor, dtype: torch.dtype, count: int) -> int:
    """The address of what must be `count` dense numbers of a type in this host's memory; else a TypeError."""
    if x.dtype != dtype or x.numel() != count or not x.is_cpu or not x.is_contiguous():
        found = f"{x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"
        raise TypeError(f"a native kernel needs {count} dense {dtype} on the CPU, got {found}")
    return x.data_ptr()


def _threads() -> int:
    return torch.get_num_threads()


def _rows(x: Tensor) -> Tensor:
    """[T, heads, head_dim] with dense heads; tokens may be far apart (a part of a fused projection)."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _layout(k_cache: Tensor, v_cache: Tensor) -> CacheLayout:
    if k_cache.stride(0) != v_cache.stride(0):
        raise ValueError(f"K blocks are {k_cache.stride(0)} elements apart, V blocks {v_cache.stride(0)}")
    return CacheLayout(
        block_size=k_cache.shape[1],
        block_stride=k_cache.stride(0),
        k_head_stride=k_cache.stride(2),
        k_token_stride=k_cache.stride(1),
        k_dim_stride=k_cache.stride(3),
        v_head_stride=v_cache.stride(2),
        v_token_stride=v_cache.stride(1),
    )
