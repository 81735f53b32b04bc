"""Quantized checkpoints in the published layouts, written from plain ones, and their dequantized numbers in float64.

``quantize`` rounds and ``dequantize`` reads back, each number by itself and by the formula of its format
(formats-targets.md section A). They import nothing of the product and share only the layouts.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.reference.models import load_checkpoint, save_checkpoint
from tests.reference.packed_bits import (
    awq,
    awq_weight,
    by_activations,
    floats,
    floats_weight,
    gptq,
    gptq_weight,
    pack_quantized,
    pack_quantized_weight,
)

WIDE: dict[str, Any] = {"hidden": 192, "inner": 320, "heads": 4, "kv_heads": 2, "head_dim": 48, "layers": 2}
"""Sizes of a target: q ends within a block, k and v too; blocks of inputs and of outputs are short."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FP8 = torch.float8_e4m3fn
LARGEST = 448.0

State = dict[str, Tensor]
Parts = Callable[[Tensor], State]  # of a weight [O, I]: what a file holds, by the last part of its names


def fp8_per_tensor(weight: Tensor) -> State:
    scale = weight.abs().max() / LARGEST
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale, "input_scale": torch.tensor(0.03)}


def fp8_per_output(weight: Tensor) -> State:
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale.bfloat16()}


def fp8_blocks(name: str, size: int = 128) -> Parts:
    """The last block of a row or column may be short."""

    def parts(weight: Tensor) -> State:
        outputs, inputs = weight.shape
        scale = torch.empty(-(-outputs // size), -(-inputs // size))
        values = torch.empty(outputs, inputs, dtype=FP8)
        for a in range(scale.shape[0]):
            for b in range(scale.shape[1]):
                block = slice(size * a, size * a + size), slice(size * b, size * b + size)
                scale[a, b] = weight[block].abs().max() / LARGEST
                values[block] = (weight[block] / scale[a, b]).to(FP8)
        return {"weight": values, name: scale}

    return parts


def int8_per_output(weight: Tensor) -> State:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def dequantize_8_bits(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """A scale of one number, of one an output, or of blocks of 128 x 128: its shape tells which."""
    weight, size = tensors["weight"], 128
    scale = tensors.get("weight_scale", tensors.get("weight_scale_inv"))
    assert scale is not None
    if scale.numel() > 1 and scale.shape != (weight.shape[0], 1):
        block_O, block_I = (torch.arange(many) // size for many in weight.shape)
        scale = scale[block_O][:, block_I]
    return weight.double() * scale.double()


def compressed(
    weights: dict[str, Any], kept_as: str, ignore: tuple[str, ...] = ("lm_head",)
) -> dict[str, Any]:
    inputs = {"num_bits": 8, "dynamic": True} if kept_as != "pack-quantized" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": kept_as,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def packed_group(group: int, bits: int = 4, **fields: Any) -> dict[str, Any]:
    """compressed-tensors' configuration of W4A16 and W8A16; ``group`` -1: a scale an output."""
    sizes = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "actorder": None, **sizes, **fields}
    return compressed(weights, "pack-quantized")


def awq_config(group: int, **fields: Any) -> dict[str, Any]:
    found = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return {**found, "modules_to_not_convert": None, **fields}


def gptq_config(group: int, **fields: Any) -> dict[str, Any]:
    found = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False}
    return {**found, "checkpoint_format": "gptq", "lm_head": False, "pack_dtype": "int32", **fields}


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FLOAT4 = {**FLOAT8, "num_bits": 4}
DIALECTS: dict[str, tuple[Parts, dict[str, Any]]] = {
    "fp8 a tensor": (
        fp8_per_tensor,
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "fp8 blocks": (
        fp8_blocks("weight_scale_inv"),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        },
    ),
    "fbgemm": (
        fp8_per_output,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "modelopt": (
        fp8_per_tensor,
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.9*"]},
    ),
    "modelopt nvfp4": (
        floats("weight", "weight_scale_2"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    ),
    "nvfp4": (
        floats("weight_packed", "weight_global_scale"),
        compressed({**FLOAT4, "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized"),
    ),
    "mxfp4": (
        floats("weight_packed", None),
        compressed({**FLOAT4, "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized"),
    ),
    "compressed FP8 a tensor": (
        lambda weight: {
            name: each.reshape(-1) if each.dim() == 0 else each
            for name, each in fp8_per_tensor(weight).items()
        },
        compressed({**FLOAT8, "strategy": "tensor"}, "float-quantized"),
    ),
    "compressed FP8 an output": (
        fp8_per_output,
        compressed({**FLOAT8, "strategy": "channel"}, "float-quantized", ("re:.*lm_head",)),
    ),
    "compressed FP8 blocks": (
        fp8_blocks("weight_scale"),
        compressed({**FLOAT8, "strategy": "block", "block_structure": [128, 128]}, "float-quantized"),
    ),
    "compressed int8": (
        int8_per_output,
        compressed({"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}, "int-quantized"),
    ),
    "awq": (awq(64), awq_config(64)),
    "awq an output": (awq(-1), awq_config(-1)),
    "gptq": (gptq(128, bias=True), gptq_config(128)),
    "gptq asymmetric": (gptq(32, zeros=True), gptq_config(32, sym=False)),
    "gptq_v2": (
        gptq(64, zeros=True, less=0, indexed=False),
        gptq_config(64, sym=False, checkpoint_format="gptq_v2"),
    ),
    "gptq an output": (gptq(-1), gptq_config(-1)),
    "gptq act order": (
        gptq(64, index=lambda inputs, group, weight: by_activations(inputs, group)),
        gptq_config(64, desc_act=True),
    ),
    "gptq act order of each": (
        gptq(
            64,
            index=lambda inputs, group, weight: by_activations(inputs, group, int(1e4 * weight.abs().sum())),
        ),
        gptq_config(64, desc_act=True),
    ),
    "gptq int8": (gptq(32, bits=8), gptq_config(32, bits=8)),
    "W4A16": (pack_quantized(128), packed_group(128)),
    "W4A16 asymmetric": (pack_quantized(32, zeros=True), packed_group(32, symmetric=False)),
    "W4A16 an output": (pack_quantized(-1), packed_group(-1, actorder="static")),
    "W4A16 act order": (pack_quantized(64, by_activation=True), packed_group(64, actorder="group")),
    "W8A16": (pack_quantized(-1, bits=8), packed_group(-1, 8)),
    "W8A16 groups": (pack_quantized(64, bits=8), packed_group(64, 8)),
}
"""How each dialect stores a weight, and its ``quantization_config``."""


READERS: dict[str, Callable[[Mapping[str, Tensor], Mapping[str, Any]], Tensor]] = {
    "weight_packed": pack_quantized_weight,
    "qweight": awq_weight,
    "weight_scale": dequantize_8_bits,
    "weight_scale_inv": dequantize_8_bits,
}
"""What the tensors of a module mean, by one that they are known by."""
SIDE_FILES = {"awq": "quant_config.json", "gptq": "quantize_config.json", "modelopt": "hf_quant_config.json"}


def quantize(
    plain: Path,
    path: Path,
    dialect: str,
    quantized: Callable[[str], bool] = lambda module: True,
    projections: tuple[str, ...] = PROJECTIONS,
) -> Path:
    """Write the checkpoint ``plain`` in a dialect; ``quantized``: which of the projections."""
    parts, quantization = DIALECTS[dialect]
    state, config = load_checkpoint(plain)
    found: State = {}
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.endswith(projections) and quantized(module):
            found.update({f"{module}.{kind}": each for kind, each in parts(tensor.float()).items()})
        else:
            found[name] = tensor
    config["quantization_config"] = quantization
    return save_checkpoint(path, found, config, safetensors=True)


def dequantize(path: Path) -> tuple[State, dict[str, Any]]:
    """(tensors, config.json) of the plain checkpoint, in float64, that a quantized one stands for. Modules in FP8 have
    ``rounded_inputs`` too."""
    state, config = load_checkpoint(path)
    quantization = config.pop("quantization_config")
    modules = {name.rpartition(".")[0] for name in state if name.endswith(tuple(READERS))}
    found = {
        name: tensor.double() for name, tensor in state.items() if name.rpartition(".")[0] not in modules
    }
    for module in modules:
        own = {
            name.removeprefix(f"{module}."): t for name, t in state.items() if name.startswith(f"{module}.")
        }
        read = READERS[next(kind for kind in READERS if kind in own)]
        read = gptq_weight if quantization["quant_method"] == "gptq" else read
        read = floats_weight if any(each.dtype == torch.uint8 for each in own.values()) else read
        found[f"{module}.weight"] = read(own, quantization)
        if own.get("weight", found[f"{module}.weight"]).dtype == FP8:
            found[f"{module}.rounded_inputs"] = torch.tensor(True)
        if "bias" in own and own["bias"].any():
            found[f"{module}.bias"] = own["bias"].double()
    return found, config


def write_meant(quantized: Path, path: Path) -> Path:
    """Write the plain checkpoint that a quantized one stands for, without ``rounded_inputs``."""
    state, config = dequantize(quantized)
    plain = {name: each for name, each in state.items() if not name.endswith("rounded_inputs")}
    return save_checkpoint(path, plain, config, safetensors=True)


def write_side_file(path: Path) -> None:
    """Move a configuration to the file that older checkpoints have it in."""
    config = json.loads((path / "config.json").read_text())
    fields = config.pop("quantization_config")
    method = fields.pop("quant_method")
    (path / "config.json").write_text(json.dumps(config))
    side = {
        "awq": {
            "zero_point": True,
            "q_group_size": fields.get("group_size"),
            "w_bit": fields.get("bits"),
            "version": "GEMM",
        },
        "gptq": {name: fields.get(name) for name in ("bits", "group_size", "sym", "desc_act")},
        "modelopt": {"producer": {"name": "modelopt"}, "quantization": fields},
    }
    (path / SIDE_FILES[method]).write_text(json.dumps(side[method]))


def configure(path: Path, **fields: Any) -> Path:
    """Give a checkpoint's ``quantization_config`` other fields, None for none."""
    config = json.loads((path / "config.json").read_text())
    found = {**config["quantization_config"], **fields}
    config["quantization_config"] = {name: each for name, each in found.items() if each is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def scaled(**fields: Any) -> dict[str, Any]:
    """compressed-tensors' configuration with other fields of its group's weights."""
    return compressed({**FLOAT8, "strategy": "tensor", **fields}, "float-quantized")
