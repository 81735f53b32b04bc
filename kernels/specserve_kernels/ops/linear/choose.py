"""Which kernel multiplies: one place for all formats of a weight.

| weight | tokens | kernel | where |
|---|---|---|---|
| 16 bits, no bias | 9 to 128 | ``swap_ab`` | Hopper, if its programs fill the device or are too few for cuBLAS |
| 16 bits | up to 16; all for at most 128 outputs | ``few`` | all but wide heads |
| 16 bits | others | ``cublas`` | |
| as in a file, FP8, int8, 4 bits | up to 16 | ``streamed`` | Hopper, not gated |
| as in a file, int8, 4 bits | from 17, 33 or 65 on | ``specialized`` | Hopper, not gated, programs fill it |
| as in a file, FP8 | from 65 on | ``specialized`` | Hopper, not gated, scales of blocks |
| as in a file | others | ``packed`` | |
| a draft's copy, int8 or FP8 | few, see ``specserve.layers.linear`` | ``integer``, ``quantized`` | |

Gates of weights as in a file are multiplied as two outputs, and gated where the next launch rounds them
(``gate_rounded``), so that the kernels for Hopper serve them too. All thresholds are measured on an H200.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specserve_kernels.ops.device import (
    HOPPER,
    Limits,
    capability_of,
    cdiv,
    copies,
    limits_of,
    next_power_of_2,
)
from specserve_kernels.ops.pdl import INTERPRETED, overlap
from specserve_kernels.reference.linear.packed import STEP, Packed
from specserve_kernels.reference.linear.quantize import FP8

FEW_TOKENS = 16  # of ``few`` and ``streamed``
SWAPPED_TOKENS = 128  # most of ``swap_ab``
MANY_OUTPUTS = 16384  # from this many on, tiles are wide
LONE = 64  # most tokens for which a program of ``swap_ab`` has its multiprocessor to itself
_HALF_EMPTY = 96  # most tokens for which a tile of 128 takes as long as cuBLAS
_FULL = 0.7  # least share of the multiprocessors that programs of ``swap_ab`` occupy, over all waves
_NARROW = 128  # outputs for which cuBLAS has one program: 85 microseconds for 64 tokens of 4,096 inputs
_STARVED = (32, 3072), (64, 2047), (96, 1024)
"""Most tokens and outputs for which cuBLAS, which may not split K, has few programs for more than ``_LONG`` inputs, of
23 ns an input: 91 to 98 microseconds for some or all of these numbers of tokens with 4,096 inputs, where ``swap_ab``
takes 10 to 14 (31 from 65 on), and 9 to 12 for 128 tokens. With a bias, which ``swap_ab`` does not add, ``few`` takes 8
to 15 of 66 to 84 for 2,880 and 3,584 inputs."""
_LONG = 2048
_HEAD = 1 << 16  # outputs from which a weight is a target's head, which cuBLAS multiplies
FEW_OUTPUTS = 32  # of a program of ``few``, if multiprocessors have one or two programs each
ROWS_EACH = 64  # outputs of a block that the copy engine brings
SPECIALIZED_OUTPUTS, SPECIALIZED_TOKENS = 256, 64  # of a program
FLOAT_OUTPUTS, FLOAT_TOKENS = 128, 128  # in FP8, where a program has one product or two of that many tokens
_TWO, _SHARED = (
    1.7,
    12,
)  # steps of one product that take as long as one of two, and as adding the sums of programs
_PROMPT = 512  # tokens, from which the programs after the last full wave are few
_FILLED = 0.8  # of the multiprocessors, by the last programs of ``specialized`` too
_ALIGNED = 4  # words, which are 16 bytes: the copy engine does not begin in between


class LaunchConfig(NamedTuple):
    """A program's tokens, outputs (of ``packed``, if gated, as many again), and inputs of a step; steps in flight, and
    warps; and how many programs share a tile."""

    tokens: int
    outputs: int
    inputs: int
    stages: int
    warps: int
    parts: int = 1


Plain = Literal["swap_ab", "few", "cublas"]


def for_plain(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gated: bool) -> Plain:
    """Return the kernel for a weight in the activations' dtype."""
    if x_TI.dim() != 2 or x_TI.dtype not in (torch.bfloat16, torch.float16):
        return "cublas"
    if bias_O is None and _swaps(x_TI, weight_OI, gated):
        return "swap_ab"
    if len(weight_OI) <= _NARROW or (bias_O is not None and _starves(x_TI, weight_OI) and len(x_TI) <= LONE):
        return "few"
    limits = limits_of(x_TI.device)
    most = _HEAD if overlap()["OVERLAP"] else limits.processors * FEW_OUTPUTS
    return "few" if len(x_TI) <= FEW_TOKENS and len(weight_OI) <= most else "cublas"


def _swaps(x_TI: Tensor, weight_OI: Tensor, gated: bool) -> bool:
    (tokens, _), (outputs, inputs) = x_TI.shape, weight_OI.shape
    if not 8 < tokens <= SWAPPED_TOKENS or capability_of(x_TI.device)[0] != HOPPER:
        return False
    starves = _starves(x_TI, weight_OI)
    if tokens <= FEW_TOKENS:
        wins = outputs >= MANY_OUTPUTS
    else:
        wins = starves or tokens <= LONE or (tokens > _HALF_EMPTY and gated)
    if not (wins and copies(x_TI) and copies(weight_OI)):
        return False
    if starves:
        return True
    limits = limits_of(x_TI.device)
    return _fills(swap_ab_config(outputs, inputs, tokens, gated, limits), outputs, limits)


def _starves(x_TI: Tensor, weight_OI: Tensor) -> bool:
    (tokens, inputs), outputs = x_TI.shape, len(weight_OI)
    if tokens <= FEW_TOKENS or outputs <= _NARROW or inputs <= _LONG:
        return False
    return capability_of(x_TI.device)[0] == HOPPER and any(tokens <= t and outputs <= o for t, o in _STARVED)


def swap_ab_config(outputs: int, inputs: int, tokens: int, gated: bool, limits: Limits) -> LaunchConfig:
    """Choose the launch of ``swap_ab``, from a sweep over the layers of Llama-3.1-8B on an H200, except for
    gates of few outputs. With less shared memory, there are fewer stages. A gate's two products share a program's
    outputs."""
    columns = max(16, next_power_of_2(tokens))
    if tokens > LONE:
        chosen = LaunchConfig(columns, 128, 64, 3, 4)
    elif outputs >= MANY_OUTPUTS:
        chosen = (
            LaunchConfig(columns, 128, 128, 3, 4) if tokens <= 16 else LaunchConfig(columns, 256, 64, 4, 8)
        )
    elif gated:
        chosen = LaunchConfig(columns, 128, 128, 3, 4)
    else:
        chosen = LaunchConfig(columns, 64, 128, 5 if tokens <= 32 else 4, 4)
    stages = min(chosen.stages, (limits.shared_bytes - 2048) // _stage_bytes(chosen))
    return chosen._replace(stages=max(1, stages))


def _stage_bytes(config: LaunchConfig) -> int:
    """Return the shared memory of a stage of ``swap_ab``."""
    return 2 * (config.tokens + config.outputs) * config.inputs


def _fills(config: LaunchConfig, outputs: int, limits: Limits) -> bool:
    programs = cdiv(outputs, config.outputs)
    places = limits.processors * max(1, limits.shared_bytes // (config.stages * _stage_bytes(config)))
    return programs >= _FULL * places * cdiv(programs, places)


def for_packed(weight: Packed, tokens: int, share: int) -> Literal["streamed", "specialized", "packed"]:
    """Return the kernel for a weight as in a file, not gated, whose inputs are divided into ranges of ``share``."""
    if not tokens or not _copied(weight):
        return "packed"
    if tokens <= FEW_TOKENS and (not weight.grouped or weight.rows == 1 or weight.rows % ROWS_EACH == 0):
        return "streamed"
    return "specialized" if _specializes(weight, tokens, share) else "packed"


def _copied(weight: Packed) -> bool:
    """Return whether Hopper's copy engine can bring this weight in blocks of ``ROWS_EACH`` outputs."""
    hopper = capability_of(weight.values.device)[0] == HOPPER and not INTERPRETED
    return hopper and not weight.floats and weight.step == STEP and len(weight.values) % _ALIGNED == 0


def specialized_config(weight: Packed, tokens: int, share: int, limits: Limits) -> LaunchConfig:
    """Choose the launch of ``specialized``. In FP8 the busiest program has the least to do, and few launches differ,
    because each is compiled. Ranges of inputs have programs of their own only if all these run at the same time."""
    outputs, ranges = len(weight.values), cdiv(weight.inputs, share)
    if weight.values.dtype != FP8:
        columns = min(SPECIALIZED_TOKENS, next_power_of_2(tokens))
        return LaunchConfig(columns, SPECIALIZED_OUTPUTS, STEP, 0, 4, ranges)
    columns = cdiv(tokens, FLOAT_TOKENS) * FLOAT_TOKENS if tokens <= _PROMPT else 4 * _PROMPT
    found = []
    for products, steps in ((1, 1.0), (2, _TWO)):
        block = LaunchConfig(products * FLOAT_TOKENS, FLOAT_OUTPUTS, STEP, 0, 4)
        tiles = cdiv(outputs, block.outputs) * cdiv(columns, block.tokens)
        turns = max(tiles / limits.processors, 1) if ranges == 1 else cdiv(tiles, limits.processors)
        found.append((turns * steps * cdiv(weight.inputs, STEP), block))
        if 1 < ranges <= limits.processors / tiles and columns <= _PROMPT:
            found.append((steps * share / STEP + _SHARED, block._replace(parts=ranges)))
    return min(found)[1]


def _specializes(weight: Packed, tokens: int, share: int) -> bool:
    if weight.values.dtype == FP8:
        return weight.grouped and weight.rows % ROWS_EACH == 0 and tokens > 64
    if weight.grouped and weight.rows > 1:
        return False
    processors, parts = limits_of(weight.values.device).processors, cdiv(weight.inputs, share)
    programs = cdiv(len(weight.values), SPECIALIZED_OUTPUTS) * parts
    if parts == 1 and tokens >= _PROMPT:
        return programs * cdiv(tokens, SPECIALIZED_TOKENS) >= processors
    fills = programs >= _FILLED * processors * cdiv(programs, processors)
    if parts == 1:
        return fills and tokens > (16 if weight.bits == 4 else 64)
    # the programs of a tile wait for each other, so all must run at the same time
    return fills and 32 < tokens <= SPECIALIZED_TOKENS and programs <= processors
