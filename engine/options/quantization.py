"""Parameters of weight and KV quantization that are not built yet."""

from __future__ import annotations

from engine.options.option import Option

KV = "KV cache quantization"
WEIGHTS = "weight quantization"

METHODS = (
    *("awq", "gptq", "bitsandbytes", "fp8", "hqq", "compressed-tensors", "gguf", "marlin", "gptq_marlin"),
    *("awq_marlin", "gptq_marlin_24", "aqlm", "fbgemm_fp8", "modelopt", "deepspeedfp", "qqq", "experts_int8"),
    *("quark", "moe_wna16", "ipex", "tpu_int8", "neuron_quant"),
)
OTHER_HARDWARE = {
    "tpu_int8": "TPU hardware is not supported",
    "neuron_quant": "Neuron hardware is not supported",
}
KV_FORMATS = (
    *("no_quant", "fp8", "int8", "int4", "int8_affine", "int4_affine", "fp8_e5m2", "fp8_e4m3"),
    *("mix_f852i4", "mix_f843i4", "mix_i8i4", "mix_i4i4"),
)

QUANTIZATION = (
    Option("kv_cache_quant", "str", "no_quant", "KV format; mix_XY: K in X, V in Y", "quantization", feature=KV,
           choices=KV_FORMATS, synonyms={"auto": "no_quant"}, aliases=("kv_cache_dtype",)),
    Option("kv_cache_quant_sub_heads", "int", 1, "scale groups inside one head's dimension", "quantization",
           feature=KV, low=1),
    Option("calculate_kv_scales", "bool", False, "K and V scales of fp8 KV computed at run time", "quantization",
           feature=KV),
    Option("quantization", "str", None, "weight quantization method", "quantization", feature=WEIGHTS,
           choices=METHODS, refused=OTHER_HARDWARE, short=("-q",)),
    Option("enable_quant", "bool", False, "quantize weights while loading", "quantization", feature=WEIGHTS),
    Option("asymmetry", "bool", False, "zero points", "quantization", feature=WEIGHTS),
    Option("block_wise_quant", "bool", False, "scales per block instead of per channel", "quantization",
           feature=WEIGHTS),
    Option("enable_cute", "bool", False, "fused low-bit matmul kernels", "quantization", feature=WEIGHTS),
    Option("no_scale", "bool", False, "no scales", "quantization", feature=WEIGHTS),
    Option("quant_lm_head", "bool", False, "quantize the output head too", "quantization", feature=WEIGHTS),
    Option("rotate", "bool", False, "Hadamard rotation before quantizing", "quantization", feature=WEIGHTS),
    Option("random_rotate_matrix", "bool", False, "random orthogonal rotation instead", "quantization",
           feature=WEIGHTS),
    Option("skip_ffn_fc2", "bool", False, "leave the MLP down projection as it is", "quantization", feature=WEIGHTS),
)  # fmt: skip
