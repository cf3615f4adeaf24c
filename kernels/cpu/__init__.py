"""CPU kernels in torch."""

from kernels.cpu.attention import attention
from kernels.cpu.cache import write_kv
from kernels.cpu.elementwise import add_rms_norm, rms_norm, rope, silu_mul

__all__ = ["add_rms_norm", "attention", "rms_norm", "rope", "silu_mul", "write_kv"]
