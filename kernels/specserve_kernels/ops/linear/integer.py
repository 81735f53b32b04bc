"""A projection of few tokens with int8 weights and activations, by the kernel of ``quantized_linear``.

Nothing is converted: integers go to the tensor cores as they are in memory. Activations that are not quantized yet are
quantized by a separate launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.ops.device import H200, Limits, cdiv, limits_of, next_power_of_2
from specserve_kernels.ops.linear.choose import LaunchConfig
from specserve_kernels.ops.linear.quantize import round_inputs
from specserve_kernels.ops.linear.quantized import multiply
from specserve_kernels.reference.layer.activation import Gate
from specserve_kernels.reference.linear.quantize import GROUP, Rounded

_PROGRAMS = {32: 3, 64: 2}  # wanted programs per multiprocessor, by a program's tokens
_LEAST_GROUPS, _MOST_PARTS = 4, 4
_STAGES, _LEAST_STAGES = 5, 3  # with and without split-K
_MOST_TOKENS = 64  # of a program
_WARPS = 4
_SCALE_BYTES = 4  # the scale of each row of a group


def integer_linear(
    x_TI: Tensor | Rounded,
    weight_OI: Tensor,
    scale_OG: Tensor,
    bias_O: Tensor | None = None,
    gated: Gate = None,
) -> Tensor:
    """Same as the reference. Rows of x may be strided."""
    x = round_inputs(x_TI, torch.int8) if isinstance(x_TI, Tensor) else x_TI
    tokens, inputs = x.values.shape
    block = launch_config(len(weight_OI), inputs, tokens, limits_of(weight_OI.device))
    return multiply(x.values, x.unit_GT, x.dtype, (weight_OI, scale_OG), bias_O, gated, block)


def launch_config(outputs: int, inputs: int, tokens: int, limits: Limits = H200) -> LaunchConfig:
    """Choose the launch, from a sweep over the layers of Llama-3.1-8B's draft on an H200. With split-K there are as
    many stages as let all programs run at once, and at least three if there is room. With less shared memory, there are
    fewer."""
    columns = min(max(8, next_power_of_2(tokens)), _MOST_TOKENS)
    rows = 64 if tokens <= 16 else 128
    tiles = max(1, cdiv(outputs, rows) * cdiv(tokens, columns))
    programs = limits.processors * next(each for most, each in _PROGRAMS.items() if columns <= most)
    most = min(programs // tiles, cdiv(inputs, GROUP) // _LEAST_GROUPS)
    parts = max(1, min(most, _MOST_PARTS))
    room = limits.shared_bytes // ((columns + rows) * (GROUP + _SCALE_BYTES))
    stages = _LEAST_STAGES
    if parts > 1:
        stages = max(stages, min(_STAGES, room // cdiv(tiles * parts, limits.processors)))
    return LaunchConfig(columns, rows, GROUP, max(1, min(stages, room)), _WARPS, parts)
