"""Weights of 4 and 8 bits in the layouts of AutoAWQ, GPTQ, compressed-tensors' pack-quantized, MXFP4 and NVFP4.

Writers quantize a weight ``[O, I]`` and pack it as the tools do; readers dequantize a file in float64. Neither imports
the product. Numbers in a word begin at its lowest bits.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
WRITTEN = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: the output in each place of a word
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # and the place of each output


def in_order(inputs: int, group: int) -> Tensor:
    return torch.arange(inputs) // group


def by_activations(inputs: int, group: int, seed: int = 0) -> Tensor:
    """The groups of inputs that were sorted by something else."""
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
    index = torch.empty(inputs, dtype=torch.int64)
    index[order] = in_order(inputs, group)
    return index


def rounded(
    weight: Tensor, index: Tensor, bits: int, zeros: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers ``[O, I]`` from 0 on, scales ``[O, G]`` in ``dtype``, and the numbers ``[O, G]`` that stand for 0."""
    largest = 2**bits - 1
    scales, points, values = [], [], torch.empty(weight.shape, dtype=torch.int64)
    for group in range(int(index.max()) + 1):
        part = weight[:, index == group]
        if zeros:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / largest).to(dtype).float()
            point = (-low / scale).round().clamp(0, largest)
        else:
            scale = (part.abs().amax(1) / (largest / 2)).to(dtype).float()
            point = torch.full_like(scale, 2 ** (bits - 1))
        values[:, index == group] = (part / scale[:, None] + point[:, None]).round().clamp(0, largest).long()
        scales.append(scale.to(dtype))
        points.append(point.long())
    return values, torch.stack(scales, 1), torch.stack(points, 1)


def packed(numbers: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of the last dimension, which is filled with zeros; ``places``: the number in each place of a word."""
    each = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % each))
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // each, dtype=torch.int64)
    for place, number in enumerate(places or range(each)):
        words |= numbers[..., number::each] << (bits * place)
    return torch.where(words < 2**31, words, words - 2**32).int()


def unpacked(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """The numbers again; ``places``: of each number in a word."""
    each = 32 // bits
    numbers = torch.empty(*words.shape[:-1], each * words.shape[-1], dtype=torch.int64)
    for number, place in enumerate(places or range(each)):
        numbers[..., number::each] = (words.long() >> (bits * place)) & (2**bits - 1)
    return numbers


def awq(group: int) -> Callable[[Tensor], State]:
    """``group`` -1: all inputs."""

    def parts(weight: Tensor) -> State:
        inputs = weight.shape[1]
        index = in_order(inputs, inputs if group < 0 else group)
        values, scale, zero = rounded(weight, index, 4, True, torch.float16)
        return {
            "qweight": packed(values.T, 4, WRITTEN),
            "qzeros": packed(zero.T, 4, WRITTEN),
            "scales": scale.T.contiguous(),
        }

    return parts


def awq_weight(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    values, zero = (unpacked(tensors[name], 4, PLACE) for name in ("qweight", "qzeros"))
    group = config["group_size"] if config["group_size"] > 0 else len(values)
    return torch.stack(
        [
            (row - zero[k // group]).double() * tensors["scales"][k // group].double()
            for k, row in enumerate(values)
        ],
        1,
    )


def gptq(
    group: int,
    bits: int = 4,
    zeros: bool = False,
    less: int = 1,
    index: Callable[[int, int, Tensor], Tensor] = lambda inputs, group, weight: in_order(inputs, group),
    indexed: bool = True,
    bias: bool = False,
) -> Callable[[Tensor], State]:
    """``less``: what stored zero points lack. ``bias``: write one of zeros, as older tools do."""

    def parts(weight: Tensor) -> State:
        inputs = weight.shape[1]
        groups = index(inputs, inputs if group < 0 else group, weight)
        values, scale, zero = rounded(weight, groups, bits, zeros, torch.float16)
        found = {
            "qweight": packed(values, bits).T.contiguous(),
            "qzeros": packed((zero.T - less) % 2**bits, bits),
            "scales": scale.T.contiguous(),
        }
        if indexed:
            found["g_idx"] = groups.int()
        if bias:
            found["bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return found

    return parts


def gptq_weight(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    bits, less = config["bits"], int(config.get("checkpoint_format") != "gptq_v2")
    if "g_idx" in tensors:  # which knows more than a configuration with exceptions
        bits = 32 * len(tensors["qweight"]) // len(tensors["g_idx"])
    values = unpacked(tensors["qweight"].T, bits)
    zero = (unpacked(tensors["qzeros"], bits) + less) % 2**bits
    inputs = values.shape[1]
    size = inputs if config["group_size"] < 0 else config["group_size"]
    groups = tensors["g_idx"].tolist() if "g_idx" in tensors else in_order(inputs, size).tolist()
    scale = tensors["scales"].double()
    return (values - zero[groups].T).double() * scale[groups].T


def pack_quantized(
    group: int, bits: int = 4, zeros: bool = False, by_activation: bool = False
) -> Callable[[Tensor], State]:
    """``group`` -1: a scale an output."""

    def parts(weight: Tensor) -> State:
        outputs, inputs = weight.shape
        size = inputs if group < 0 else group
        index = by_activations(inputs, size) if by_activation else in_order(inputs, size)
        values, scale, zero = rounded(weight, index, bits, zeros, torch.bfloat16)
        found = {
            "weight_packed": packed(values, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if zeros:
            found["weight_zero_point"] = packed(zero.T, bits).T.contiguous()
        if by_activation:
            found["weight_g_idx"] = index.int()
        return found

    return parts


def pack_quantized_weight(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    outputs, inputs = tensors["weight_shape"].tolist()
    bits = 32 * tensors["weight_packed"].shape[1] // inputs
    values = unpacked(tensors["weight_packed"], bits)[:, :inputs]
    scale = tensors["weight_scale"].double()
    zero = torch.full(scale.shape, 2 ** (bits - 1))
    if "weight_zero_point" in tensors:
        zero = unpacked(tensors["weight_zero_point"].T, bits).T[:outputs]
    fields = next(iter(config["config_groups"].values()))["weights"]
    size = fields["group_size"] if fields["strategy"] == "group" else inputs
    groups = (tensors["weight_g_idx"] if "weight_g_idx" in tensors else in_order(inputs, size)).tolist()
    return (values - zero[:, groups]).double() * scale[:, groups]


E2M1 = torch.tensor([sign * each for sign in (1, -1) for each in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def floats(values: str, unit: str | None) -> Callable[[Tensor], State]:
    """NVFP4 with the tensor's scale ``unit``, MXFP4 without; ``values``: the name of the numbers."""

    def parts(weight: Tensor) -> State:
        groups = weight.unflatten(1, (-1, 16 if unit else 32))
        largest, whole = groups.abs().amax(2) / 6, (weight.abs().max() / 6 / 448).reshape(1)
        if unit:
            scale = (largest / whole).to(torch.float8_e4m3fn)
            size = scale.float() * whole
        else:
            power = largest.log2().ceil()
            scale, size = (power + 127).to(torch.uint8), 2.0**power
        codes = ((groups / size[..., None])[..., None] - E2M1).abs().argmin(-1).flatten(1)
        found = {values: (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), "weight_scale": scale}
        if unit == "weight_scale_2":
            return {**found, unit: whole[0], "input_scale": torch.tensor(0.03)}
        return {**found, unit: 1 / whole, "input_global_scale": torch.ones(1)} if unit else found

    return parts


def floats_weight(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Sign, exponent and half of each number, times its scales."""
    packed = tensors["weight_packed" if "weight_packed" in tensors else "weight"].long()
    codes = torch.stack((packed % 16, packed // 16), -1).flatten(1)
    sign, exponent, half = 1 - 2.0 * (codes // 8), codes // 2 % 4, codes % 2 / 2
    size = torch.where(exponent == 0, half, (1 + half) * 2.0 ** (exponent - 1)).double()
    scale = tensors["weight_scale"]
    scale = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    scale = scale * tensors.get("weight_scale_2", torch.ones(())).double()
    scale = scale / tensors.get("weight_global_scale", torch.ones(())).double()
    return sign * size * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
