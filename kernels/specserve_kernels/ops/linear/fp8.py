"""A projection with FP8 weights and FP8 activations. Shapes: T tokens, O outputs, I inputs, P inputs padded to whole
steps, G groups of inputs, S scales of a group.

Outputs are the rows of the tensor cores' product, of which Hopper needs at least 64, and tokens the columns. The copy
engine (TMA) loads blocks of both, and tensor cores multiply them as they are in memory. A gate and the value it
multiplies are two products of the same inputs. Scales of outputs and tokens multiply the sums.

The order of sums is the same for any number of tokens. Inputs are divided into ``ranges``, by the weight's shape alone.
Within a range inputs are added in order, 32 at a time, and then the ranges' sums in order. For few tokens, programs
share the ranges of a tile (``split_k``). If groups of inputs have scales, a group is summed from zero, and its sum
times the scale is added with one rounding.

Within a range Hopper's tensor cores keep about 14 bits of a sum. On random numbers, 4096 inputs in one range add an
error of 0.13% of the result's norm (rounding to bfloat16: 0.17%; rounding the activations to FP8: 2.65%), 7168 inputs
0.19%.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specserve_kernels.ops.device import Limits, limits_of, tickets
from specserve_kernels.ops.layer.activation import gate_by_silu
from specserve_kernels.ops.linear.quantize import round_inputs
from specserve_kernels.ops.linear.split_k import reduce_partials, store_partial
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.reference.linear.quantize import FP8, Rounded
from specserve_kernels.reference.linear.weight_only import Packed

_ROWS = 64  # rows of the smallest tile of Hopper's tensor cores
_PROGRAMS = 160  # most programs that share ranges, on any device: ranges determine the bits of the result
_LEAST_INPUTS, _MOST_INPUTS = 512, 8192  # of a range
_MOST_STEP = 512  # inputs of a step: ranges begin at multiples
_NEIGHBORS = 8  # tiles of tokens that are multiplied by the same outputs at about the same time
_BESIDE = 2048  # bytes of shared memory outside the stages


class Pipeline(NamedTuple):
    """A program's tokens, outputs (if gated, as many again) and inputs of a step; steps in flight, and warps; and how
    many programs share a tile."""

    tokens: int
    outputs: int
    inputs: int
    stages: int
    warps: int
    parts: int = 1


def fp8_linear(
    x_TI: Tensor | Rounded, weight: Packed, bias_O: Tensor | None = None, gated: bool = False
) -> Tensor:
    """Same as the reference. Rows of x may be strided. Scales of groups are float32."""
    x = round_inputs(x_TI, FP8) if isinstance(x_TI, Tensor) else x_TI
    tokens, inputs = x.values_TI.shape
    outputs, unit_T = len(weight.values), x.unit_GT
    assert weight.zero_WON is None
    assert weight.order_I is None
    assert not weight.grouped or weight.scale_WSN.dtype == torch.float32
    width = outputs // 2 if gated else outputs
    cut = ranges(outputs, inputs, gated)
    block = pipeline(weight, tokens, gated, limits_of(weight.values.device))
    out_TO = unit_T.new_empty((tokens, width), dtype=x.dtype)
    if not tokens:
        return out_TO
    tiles = triton.cdiv(tokens, block.tokens) * triton.cdiv(width, block.outputs)
    shared = block.parts > 1
    part = unit_T.new_empty(tiles * block.parts * block.outputs * block.tokens if shared else 0)
    _fp8_linear_kernel[(tiles, block.parts)](
        TensorDescriptor.from_tensor(x.values_TI, [block.tokens, block.inputs]),
        TensorDescriptor.from_tensor(weight.values, [block.outputs, block.inputs]),
        unit_T,
        weight.scale_WSN,
        unit_T if bias_O is None else bias_O,
        out_TO,
        part,
        tickets(tiles, unit_T.device) if shared else part,
        tokens,
        O=outputs,
        I=inputs,
        SCALES=weight.scale_WSN.shape[1],
        ROWS=weight.rows,
        GROUPED=weight.grouped,
        BIAS=bias_O is not None,
        GATED=gated,
        RANGES=cut,
        PARTS=block.parts,
        BLOCK_T=block.tokens,
        BLOCK_O=block.outputs,
        SHARE=triton.cdiv(inputs, cut * _MOST_STEP) * _MOST_STEP,
        STEP=block.inputs,
        NEIGHBORS=_NEIGHBORS,
        STAGES=block.stages,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlap(),
    )
    return out_TO


def ranges(outputs: int, inputs: int, gated: bool) -> int:
    """Return the number of ranges that inputs are divided into. It depends on the weight's shape alone, not on tokens
    or device."""
    cut, tiles = 1, triton.cdiv(outputs, _ROWS)
    while not gated and 2 * cut * tiles <= _PROGRAMS and 2 * cut * _LEAST_INPUTS <= inputs:
        cut *= 2
    return max(cut, triton.cdiv(inputs, _MOST_INPUTS))


def pipeline(weight: Packed, tokens: int, gated: bool, limits: Limits) -> Pipeline:
    """Choose the launch, from a sweep over the layers of Llama-3.1-8B on an H200. With less shared memory, there are
    fewer stages."""
    outputs, inputs = len(weight.values), weight.inputs
    width, halves = (outputs // 2, 2) if gated else (outputs, 1)
    chosen = _grouped_pipeline(weight.step, tokens, gated) if weight.grouped else _pipeline(tokens, gated)
    tiles = triton.cdiv(width, chosen.outputs) * triton.cdiv(tokens, chosen.tokens)
    parts = 1 if gated or tiles >= limits.processors else ranges(outputs, inputs, gated)
    stage = chosen.inputs * (chosen.tokens + halves * chosen.outputs)
    room = (limits.shared_bytes - _BESIDE) // stage
    return chosen._replace(stages=max(1, min(chosen.stages, room)), parts=parts)


def _pipeline(tokens: int, gated: bool) -> Pipeline:
    columns = max(16, triton.next_power_of_2(tokens))
    if tokens <= 16:
        return Pipeline(16, _ROWS, 256, 3, 4) if gated else Pipeline(16, _ROWS, 512, 4, 4)
    if gated and tokens <= 256:
        return Pipeline(min(columns, 128), 128, 128, 4, 8)
    if gated:
        return Pipeline(256, _ROWS, 128, 4, 8)
    if tokens <= 128:
        return Pipeline(min(columns, 64), _ROWS, 256, 4 if tokens <= 64 else 3, 4)
    if tokens <= 256:
        return Pipeline(128, _ROWS, 128, 4, 4)
    return Pipeline(128, 128, 128, 3, 4) if tokens <= 2048 else Pipeline(256, 128, 128, 4, 8)


def _grouped_pipeline(step: int, tokens: int, gated: bool) -> Pipeline:
    """Registers hold each sum twice. While one program adds products of a group, others multiply."""
    if tokens <= 64:
        return Pipeline(max(16, triton.next_power_of_2(tokens)), _ROWS, step, 4 if gated else 6, 4)
    return Pipeline(64 if tokens <= 128 and not gated else 128, _ROWS, step, 3, 4)


@triton.jit(do_not_specialize=["tokens", "tickets_ptr"])
def _fp8_linear_kernel(
    x_desc,  # [T, I]
    weight_desc,  # [O, P]
    unit_ptr,  # [T] float32
    scale_ptr,  # [S] float32, if GROUPED [G, S]
    bias_ptr,  # [O], if BIAS
    out_ptr,  # [T, O], half as wide if GATED
    part_ptr,  # [tiles, PARTS, BLOCK_O, BLOCK_T] float32, if PARTS > 1, for which it must not be GATED
    tickets_ptr,  # [tiles] int32, 0, if PARTS > 1
    tokens,
    O: tl.constexpr,
    I: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RANGES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SHARE: tl.constexpr,
    STEP: tl.constexpr,
    NEIGHBORS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    WIDTH: tl.constexpr = O // 2 if GATED else O
    first_t, first_o = _tile(tl.program_id(0), tokens, WIDTH, BLOCK_T, BLOCK_O, NEIGHBORS)
    t, o = first_t + tl.arange(0, BLOCK_T), first_o + tl.arange(0, BLOCK_O)
    inside_t, inside_o = t < tokens, o < WIDTH
    steps: tl.constexpr = (I + STEP - 1) // STEP
    share: tl.constexpr = SHARE // STEP
    take_turn(OVERLAP)
    total, gated = tl.zeros((BLOCK_O, BLOCK_T), tl.float32), tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for number in tl.range(RANGES // PARTS, num_stages=1):
        begin = (number if PARTS == 1 else tl.program_id(1)) * share
        sums, gates = tl.zeros((BLOCK_O, BLOCK_T), tl.float32), tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for step in tl.range(begin, tl.minimum(begin + share, steps), num_stages=STAGES):
            x = x_desc.load([first_t, step * STEP]).T
            scale_ptrs = scale_ptr + step * SCALES
            weight = weight_desc.load([first_o, step * STEP])
            if GROUPED:
                sums = _add_scaled(
                    tl.dot(weight, x), tl.load(scale_ptrs + o // ROWS, mask=inside_o, other=0), sums
                )
            else:
                sums = tl.dot(weight, x, sums)
            if GATED:
                weight = weight_desc.load([WIDTH + first_o, step * STEP])
                if GROUPED:
                    scale = tl.load(scale_ptrs + (WIDTH + o) // ROWS, mask=inside_o, other=0)
                    gates = _add_scaled(tl.dot(weight, x), scale, gates)
                else:
                    gates = tl.dot(weight, x, gates)
        total += sums
        gated += gates
    if PARTS > 1:
        if store_partial(total, part_ptr, tickets_ptr, tl.program_id(0), tl.program_id(1), PARTS):
            return
        total = reduce_partials(part_ptr, tickets_ptr, tl.program_id(0), BLOCK_O, BLOCK_T, PARTS)
    unit = tl.load(unit_ptr + t, mask=inside_t, other=0)
    out = _scaled(total, unit, scale_ptr, bias_ptr, o, inside_o, ROWS, GROUPED, BIAS).to(
        out_ptr.dtype.element_ty
    )
    if GATED:
        up = _scaled(gated, unit, scale_ptr, bias_ptr, WIDTH + o, inside_o, ROWS, GROUPED, BIAS)
        out = gate_by_silu(out, up.to(out.dtype))
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * WIDTH + o[None, :]
    tl.store(out_ptrs, tl.trans(out), mask=inside_t[:, None] & inside_o[None, :])


@triton.jit
def _tile(
    program,
    tokens,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    NEIGHBORS: tl.constexpr,
):
    """Return a program's first token and first output. Programs that run at the same time take few rows of both, which
    L2 holds."""
    across: tl.constexpr = NEIGHBORS * ((WIDTH + BLOCK_O - 1) // BLOCK_O)
    first = program // across * NEIGHBORS
    many = tl.minimum(tl.cdiv(tokens, BLOCK_T) - first, NEIGHBORS)
    number = program % across
    return (first + number % many) * BLOCK_T, number // many * BLOCK_O


@triton.jit
def _scaled(
    sums,
    unit,
    scale_ptr,
    bias_ptr,
    o,
    inside_o,
    ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Multiply the sums by their scales and add the bias."""
    if not GROUPED:
        sums *= tl.load(scale_ptr + o // ROWS, mask=inside_o, other=0)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + o, mask=inside_o, other=0).to(tl.float32)
        return tl.fma(
            sums, tl.broadcast_to(unit[None, :], sums.shape), tl.broadcast_to(bias[:, None], sums.shape)
        )
    return sums * unit[None, :]


@triton.jit
def _add_scaled(product, scale, sums):
    """Return ``product * scale + sums`` with one rounding."""
    return tl.fma(product, tl.broadcast_to(scale[:, None], product.shape), sums)
