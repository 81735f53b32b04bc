"""Weight formats of published checkpoints, one file for each dialect of ``quantization_config``."""

from __future__ import annotations

from collections.abc import Mapping

from specserve.layers.formats import awq, compressed_tensors, float4, fp8, gptq, modelopt
from specserve.layers.weights import FORMATS, Dtypes, WeightFormat, register

register("fp8", fp8.read)
register("fbgemm_fp8", fp8.read_fbgemm)
register("modelopt", modelopt.read)
register("compressed-tensors", compressed_tensors.read)
register("awq", awq.read)
register("gptq", gptq.read)
register("mxfp4", float4.read)

_TABLES = "its weights are codebook indices, which no kernel here supports"
_OWN = "its tensors have their own names and layout, which no reader here supports"
_ODD = "no kernel here supports its number format"
_ROTATED = "it rotates activations, which no kernel here supports"
_EXPORT = "write the same model with auto-round's --format auto_gptq or auto_awq"
_ROUND = "serve the checkpoint that it was made from, with --quantization fp8, int8 or int4 to save memory"
REFUSED = {
    "aqlm": (_TABLES, _ROUND),
    "auto-round": (_OWN, _EXPORT),
    "bitnet": (_ODD, _ROUND),
    "bitsandbytes": (_TABLES, _ROUND),
    "eetq": (_OWN, _ROUND),
    "exl2": (_OWN, _ROUND),
    "exl3": (_ODD, _ROUND),
    "fp_quant": (_ROTATED, _ROUND),
    "gguf": ("GGUF files are not read", _ROUND),
    "higgs": (_TABLES, _ROUND),
    "hqq": (_OWN, _ROUND),
    "intel/auto-round": (_OWN, _EXPORT),
    "marlin": (_OWN, "serve the GPTQ checkpoint that it was made from"),
    "mlx": (_OWN, _ROUND),
    "paroquant": (_ROTATED, _ROUND),
    "qqq": (_OWN, _ROUND),
    "quanto": (_OWN, _ROUND),
    "quark": (_OWN, _ROUND),
    "spqr": (_ODD, _ROUND),
    "torchao": (_OWN, _ROUND),
    "vptq": (_TABLES, _ROUND),
}
"""Known methods that are not supported: the reason, and what to do instead."""


def read_format(quantization_config: object, files: Dtypes) -> WeightFormat:
    """Return the format of a ``quantization_config``. Raises ValueError naming the known methods."""
    config = quantization_config if isinstance(quantization_config, Mapping) else {}
    unnamed = "mlx" if {"bits", "group_size"} <= {*config} else None
    method = config.get("quant_method", unnamed)
    if isinstance(method, str) and method in FORMATS:
        return FORMATS[method](config, files)
    accepted = f"weights must be float16, bfloat16 or float32, or of quant_method {', '.join(FORMATS)}"
    if isinstance(method, str) and method in REFUSED:
        accepted = f"{'; '.join(REFUSED[method])}; {accepted}"
    raise ValueError(f"quantization_config is not supported for quant_method {method!r}: {accepted}")
