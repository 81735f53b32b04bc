"""A projection with a checkpoint's quantized weight. Shapes: T tokens, O outputs, I inputs, P inputs padded to whole
steps, W words with the scales or zero points of several groups of inputs, S scales of a group.

Outputs are the rows of the tensor cores' product, of which Hopper needs at least 64, and tokens the columns. The copy
engine (TMA) loads blocks of both. 8-bit weights are multiplied as they are in memory. A thread reads its 4-bit numbers
of a step at once, in the order of ``Packed``, makes bytes of them, and passes these to the tensor cores from its
registers; for prompts integers are first converted. A gate and the value it multiplies are two products of the
same inputs.

FP8 weights take activations in FP8. int8 and 4-bit weights take 16-bit activations as 15 bits, in two int8 numbers that
are two columns of an integer product. A step's sums are exact, and float32 holds what they add up to. 4-bit floats by
their groups' scales are exact 16-bit floats, which activations are multiplied by as they are.

The order of sums is the same for any number of tokens. Inputs are divided into ``ranges``, by the weight's shape alone.
Within a range inputs are added in order, in FP8 32 at a time, otherwise in steps, and then the ranges' sums in order.
For few tokens, programs share the ranges of a tile (``split_k``). If groups of inputs have scales, a group is summed
from zero, and its sum times the scale is added with one rounding. Scales of outputs and tokens multiply the sums.

Within a range Hopper's tensor cores keep about 14 bits of a sum in FP8. On random numbers, 4096 inputs in one range add
an error of 0.13% of the result's norm (rounding to bfloat16: 0.17%; rounding the activations to FP8: 2.65%), 7168
inputs 0.19%.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specserve_kernels.ops.device import Limits, cdiv, copies, limits_of, next_power_of_2, tickets
from specserve_kernels.ops.layer.activation import activate
from specserve_kernels.ops.linear.choose import LaunchConfig, for_packed
from specserve_kernels.ops.linear.floats import weight_of_floats
from specserve_kernels.ops.linear.nibbles import LESS, SIXTEENFOLD
from specserve_kernels.ops.linear.quantize import round_gated, round_inputs
from specserve_kernels.ops.linear.specialized import specialized_linear
from specserve_kernels.ops.linear.split_k import reduce_partials, store_partial
from specserve_kernels.ops.linear.streamed import streamed_linear
from specserve_kernels.ops.pdl import INTERPRETED, overlap, take_turn
from specserve_kernels.reference.layer.activation import GATES, Gate
from specserve_kernels.reference.linear.floats import FLOAT_STEP
from specserve_kernels.reference.linear.packed import Packed
from specserve_kernels.reference.linear.quantize import FP8, PAIRED, Rounded

_ROWS = 64  # rows of the smallest tile of Hopper's tensor cores
_PROGRAMS, _INTEGER_PROGRAMS = 160, 512
"""Most programs that share ranges, on any device: ranges determine the bits of the result. Those of integers wait more
for their own steps, so more of them must be resident."""
_LEAST_INPUTS, _MOST_INPUTS = 512, 8192  # of a range
_MOST_STEP = 512  # inputs of a step: ranges begin at multiples
_NEIGHBORS = 8  # tiles of tokens that are multiplied by the same outputs at about the same time
_LEAST_STAGES = 3  # that all programs are resident with, or not
_BESIDE = 2048  # bytes of shared memory outside the stages, scales included
CONVERT_FROM = 512  # tokens
COMPILED = tl.constexpr(not INTERPRETED)


def packed_linear(
    x_TI: Tensor | Rounded, weight: Packed, bias_O: Tensor | None = None, gated: Gate = None
) -> Tensor:
    """Same as the reference, for 16-bit activations, or any if the weight is FP8. Rows of x may be strided. If a weight
    has its own order of inputs, x is first copied into that order."""
    if weight.floats:
        assert isinstance(x_TI, Tensor)
        assert weight.unit_O is not None
        return _multiply(
            x_TI if copies(x_TI) else x_TI.contiguous(),
            weight.unit_O,
            x_TI.dtype,
            len(x_TI),
            weight,
            bias_O,
            gated,
        )
    x = _rounded(x_TI, weight)
    if (
        not gated
        and (found_TO := _hopper_linear(x, weight, bias_O, share_of(weight, gated=False))) is not None
    ):
        return found_TO
    return _multiply(x.values, x.unit_GT, x.dtype, x.unit_GT.shape[1], weight, bias_O, gated)


def _multiply(
    x: Tensor,
    unit: Tensor,
    dtype: torch.dtype,
    tokens: int,
    weight: Packed,
    bias_O: Tensor | None,
    gated: Gate,
) -> Tensor:
    """Multiply with the kernel for all GPUs. ``unit``: of tokens, or of outputs if the weight is of floats."""
    outputs, inputs, columns = len(weight.values), weight.inputs, 2 if weight.rounding == PAIRED else 1
    cut, share = ranges(weight, bool(gated)), share_of(weight, bool(gated))
    width = outputs // 2 if gated else outputs
    values, bits = weight.values, weight.bits
    if weight.floats:
        values = words_of(values)
    elif bits == 4 and tokens >= CONVERT_FROM:
        values, bits = convert(weight), 8
    block = launch_config(weight, tokens, bool(gated), limits_of(values.device))
    out_TO = unit.new_empty((tokens, width), dtype=dtype)
    if not tokens:
        return out_TO
    tiles = cdiv(tokens, block.tokens) * cdiv(width, block.outputs)
    shared = block.parts > 1
    part = unit.new_empty(tiles * block.parts * block.outputs * block.tokens if shared else 0)
    _packed_linear_kernel[(tiles, block.parts)](
        TensorDescriptor.from_tensor(x, [columns * block.tokens, block.inputs]),
        TensorDescriptor.from_tensor(
            values, [block.outputs, block.inputs * bits // (8 * values.element_size())]
        ),
        unit,
        words_of(weight.scale_WSN) if weight.grouped else weight.scale_WSN,
        unit if weight.zero_WON is None else words_of(weight.zero_WON),
        unit if bias_O is None else bias_O,
        out_TO,
        part,
        tickets(tiles, unit.device) if shared else part,
        tokens,
        O=outputs,
        I=inputs,
        SCALES=weight.scale_WSN.shape[1],
        ROWS=weight.rows,
        BITS=bits,
        SIXTEENTHS=weight.bits == 4 and weight.zero_WON is None and not weight.floats,
        FLOATS=weight.floats,
        SCALE=getattr(tl, str(weight.scale_WSN.dtype).removeprefix("torch.")),
        GROUPED=weight.grouped,
        ZEROS=bits == 4 and weight.zero_WON is not None,
        BIAS=bias_O is not None,
        GATED=GATES.index(gated),
        RANGES=cut,
        PARTS=block.parts,
        BLOCK_T=block.tokens,
        BLOCK_O=block.outputs,
        SHARE=share,
        STEP=block.inputs,
        NEIGHBORS=_NEIGHBORS,
        STAGES=block.stages,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlap(),
    )
    return out_TO


def gate_rounded(
    x_TI: Tensor | Rounded, weight: Packed, bias_O: Tensor | None, dtype: torch.dtype, gated: Gate = "silu"
) -> Rounded:
    """Same as the reference."""
    if weight.floats:
        return round_inputs(packed_linear(x_TI, weight, bias_O, gated), dtype)
    x = _rounded(x_TI, weight)
    found_TO = _hopper_linear(x, weight, bias_O, share_of(weight, gated=True))
    if found_TO is None:
        return round_inputs(packed_linear(x, weight, bias_O, gated), dtype)
    return round_gated(found_TO, dtype, gated)


def _hopper_linear(x: Rounded, weight: Packed, bias_O: Tensor | None, share: int) -> Tensor | None:
    """Multiply, not gated, with a kernel written for Hopper. None where the one for all GPUs is needed, or faster."""
    match for_packed(weight, x.unit_GT.shape[1], share):
        case "streamed":
            return streamed_linear(x, weight, bias_O, share)
        case "specialized":
            return specialized_linear(x, weight, bias_O, share)
        case _:
            return None


def _rounded(x_TI: Tensor | Rounded, weight: Packed) -> Rounded:
    if not isinstance(x_TI, Tensor):
        return x_TI
    x_TI = x_TI if weight.order_I is None else x_TI.index_select(1, weight.order_I)
    assert weight.rounding is not None
    return round_inputs(x_TI, weight.rounding)


def share_of(weight: Packed, gated: bool) -> int:
    """Return the number of inputs of a range."""
    return cdiv(weight.inputs, ranges(weight, gated) * _MOST_STEP) * _MOST_STEP


def convert(weight: Packed) -> Tensor:
    """Return the numbers ``[O, P]`` of a 4-bit weight as the tensor cores take them, int8, in the order of the
    inputs."""
    outputs, width = weight.values.shape
    out_OP = weight.values.new_empty((outputs, 2 * width), dtype=torch.int8)
    _convert_kernel[(cdiv(outputs, _ROWS), 2 * width // weight.step)](
        weight.values,
        out_OP if weight.zero_WON is None else words_of(weight.zero_WON),
        out_OP,
        O=outputs,
        P=2 * width,
        ZEROS=weight.zero_WON is not None,
        BLOCK_O=_ROWS,
        STEP=weight.step,
        num_warps=4,
        **overlap(),
    )
    return out_OP


def words_of(each_WON: Tensor) -> Tensor:
    """Return scales or zero points as kernels load them."""
    return each_WON.view(torch.int32)


def ranges(weight: Packed, gated: bool) -> int:
    """Return the number of ranges that inputs are divided into. It depends on the weight alone, not on tokens or
    device."""
    most = _PROGRAMS if weight.values.dtype == FP8 else _INTEGER_PROGRAMS
    cut, tiles = 1, cdiv(len(weight.values), _ROWS)
    while not gated and 2 * cut * tiles <= most and 2 * cut * _LEAST_INPUTS <= weight.inputs:
        cut *= 2
    return max(cut, cdiv(weight.inputs, _MOST_INPUTS))


def launch_config(weight: Packed, tokens: int, gated: bool, limits: Limits) -> LaunchConfig:
    """Choose the launch, from a sweep over the layers of Llama-3.1-8B on an H200. With less shared memory, there are
    fewer stages."""
    outputs = len(weight.values)
    width, halves = (outputs // 2, 2) if gated else (outputs, 1)
    if weight.floats:
        chosen = _for_floats(tokens, gated)
    elif weight.rounding == PAIRED:
        chosen = _for_integers(weight.step, tokens, gated)
    else:
        chosen = _for_groups(weight.step, tokens, gated) if weight.grouped else _for_fp8(tokens, gated)
    tiles = cdiv(width, chosen.outputs) * cdiv(tokens, chosen.tokens)
    parts = 1 if gated or tiles >= limits.processors else ranges(weight, gated)
    bits = 8 if tokens >= CONVERT_FROM and not weight.floats else weight.bits
    stage = chosen.inputs * (
        chosen.tokens * (1 if weight.rounding == FP8 else 2) + halves * chosen.outputs * bits // 8
    )
    room = (limits.shared_bytes - _BESIDE) // stage
    if weight.rounding == FP8 and weight.grouped:  # few programs after a full wave take as long as that
        beside = max(1, cdiv(tiles * parts, limits.processors))
        together = (limits.shared_bytes // beside - _BESIDE) // stage
        room = together if together >= _LEAST_STAGES else room
    return chosen._replace(stages=max(1, min(chosen.stages, room)), parts=parts)


def _for_fp8(tokens: int, gated: bool) -> LaunchConfig:
    columns = max(16, next_power_of_2(tokens))
    if tokens <= 16:
        return LaunchConfig(16, _ROWS, 256, 3, 4) if gated else LaunchConfig(16, _ROWS, 512, 4, 4)
    if gated and tokens <= 256:
        return LaunchConfig(min(columns, 128), 128, 128, 4, 8)
    if gated:
        return LaunchConfig(256, _ROWS, 128, 4, 8)
    if tokens <= 128:
        return LaunchConfig(min(columns, 64), _ROWS, 256, 4 if tokens <= 64 else 3, 4)
    if tokens <= 256:
        return LaunchConfig(128, _ROWS, 128, 4, 4)
    return LaunchConfig(128, 128, 128, 3, 4) if tokens <= 2048 else LaunchConfig(256, 128, 128, 4, 8)


def _for_groups(step: int, tokens: int, gated: bool) -> LaunchConfig:
    """Registers hold each sum twice. While one program adds products of a group, others multiply."""
    if tokens <= 64:
        return LaunchConfig(max(16, next_power_of_2(tokens)), _ROWS, step, 4 if gated else 6, 4)
    return LaunchConfig(64 if tokens <= 128 and not gated else 128, _ROWS, step, 3, 4)


def _for_integers(step: int, tokens: int, gated: bool) -> LaunchConfig:
    """Registers hold three numbers for each sum, and programs wait for each of their steps: several must be
    resident."""
    if tokens <= 16:
        return LaunchConfig(max(8, next_power_of_2(tokens)), _ROWS, step, 6 if gated else 4, 4)
    columns = min(next_power_of_2(tokens), 64)
    return LaunchConfig(columns, _ROWS if gated or tokens < CONVERT_FROM else 2 * _ROWS, step, 3, 4)


def _for_floats(tokens: int, gated: bool) -> LaunchConfig:
    """Not measured: as experts of such weights, whose registers hold each sum twice, too."""
    columns = min(max(16, next_power_of_2(tokens)), 64)
    return LaunchConfig(columns, _ROWS, FLOAT_STEP, 4 if tokens <= 16 else 3, 4)


@triton.jit(do_not_specialize=["tokens", "tickets_ptr"])
def _packed_linear_kernel(
    x_desc,  # [T, I], or [2T, I] if int8
    values_desc,  # [O, P], in 4 bits [O, P / 2], int32 [O, P / 8] if FLOATS
    unit_ptr,  # [T] float32, [O] if FLOATS
    scale_ptr,  # int32 [W, S] if GROUPED, or SCALE [S]
    zero_ptr,  # int32 [W, O], if ZEROS
    bias_ptr,  # [O], if BIAS
    out_ptr,  # [T, O], half as wide if GATED
    part_ptr,  # [tiles, PARTS, BLOCK_O, BLOCK_T] float32, if PARTS > 1, for which it must not be GATED
    tickets_ptr,  # [tiles] int32, 0, if PARTS > 1
    tokens,
    O: tl.constexpr,
    I: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    SIXTEENTHS: tl.constexpr,
    FLOATS: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPED: tl.constexpr,
    ZEROS: tl.constexpr,
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
    COLUMNS: tl.constexpr = x_desc.block_shape[0] // BLOCK_T
    first_t, first_o = _tile(tl.program_id(0), tokens, WIDTH, BLOCK_T, BLOCK_O, NEIGHBORS)
    t, o = first_t + tl.arange(0, BLOCK_T), first_o + tl.arange(0, BLOCK_O)
    inside_t, inside_o = t < tokens, o < WIDTH
    steps: tl.constexpr = (I + STEP - 1) // STEP
    share: tl.constexpr = SHARE // STEP
    scale_ptrs, zero_ptrs = scale_ptr + o // ROWS, zero_ptr + o
    scale_ptrs2, zero_ptrs2 = scale_ptr + (WIDTH + o) // ROWS, zero_ptr + WIDTH + o
    COLUMN: tl.constexpr = values_desc.block_shape[1]
    take_turn(OVERLAP)
    total, gated = tl.zeros((BLOCK_O, BLOCK_T), tl.float32), tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for number in tl.range(RANGES // PARTS, num_stages=1):
        begin = (number if PARTS == 1 else tl.program_id(1)) * share
        end = tl.minimum(begin + share, steps)
        sums, gates = tl.zeros((BLOCK_O, BLOCK_T), tl.float32), tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for step in tl.range(begin, end, num_stages=STAGES):
            x = x_desc.load([COLUMNS * first_t, step * STEP]).T
            values = values_desc.load([first_o, step * COLUMN])
            if FLOATS:
                weight = weight_of_floats(values, scale_ptrs, inside_o, step, O, FLOATS, x.dtype)
                sums = add_step(weight, x, sums)
            else:
                weight = numbers(values, zero_ptrs, step, inside_o, O, BITS, ZEROS)
                sums = _add(weight, x, scale_ptrs, step, inside_o, sums, SCALES, SCALE, GROUPED)
            if GATED:
                values = values_desc.load([WIDTH + first_o, step * COLUMN])
                if FLOATS:
                    weight = weight_of_floats(values, scale_ptrs2, inside_o, step, O, FLOATS, x.dtype)
                    gates = add_step(weight, x, gates)
                else:
                    weight = numbers(values, zero_ptrs2, step, inside_o, O, BITS, ZEROS)
                    gates = _add(weight, x, scale_ptrs2, step, inside_o, gates, SCALES, SCALE, GROUPED)
        total += sums
        gated += gates
    if PARTS > 1:
        if store_partial(total, part_ptr, tickets_ptr, tl.program_id(0), tl.program_id(1), PARTS):
            return
        total = reduce_partials(part_ptr, tickets_ptr, tl.program_id(0), BLOCK_O, BLOCK_T, PARTS)
    if FLOATS:
        unit = tl.full((BLOCK_T,), 1.0, tl.float32)
        scale_ptrs, scale_ptrs2 = unit_ptr + o, unit_ptr + WIDTH + o
    else:
        unit = tl.load(unit_ptr + t, mask=inside_t, other=0)
    if SIXTEENTHS:
        unit *= 1 / 16
    WHOLE: tl.constexpr = GROUPED and not FLOATS  # no scales of outputs
    out = _scaled(total, unit, scale_ptrs, bias_ptr + o, inside_o, WHOLE, BIAS).to(out_ptr.dtype.element_ty)
    if GATED:
        up = _scaled(gated, unit, scale_ptrs2, bias_ptr + WIDTH + o, inside_o, WHOLE, BIAS)
        out = activate(out, up.to(out.dtype), GATED)
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * WIDTH + o[None, :]
    tl.store(out_ptrs, tl.trans(out), mask=inside_t[:, None] & inside_o[None, :])


@triton.jit
def _convert_kernel(
    values_ptr,  # [O, P / 2]
    zero_ptr,  # int32 [W, O], if ZEROS
    out_ptr,  # [O, P]
    O: tl.constexpr,
    P: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    o, step = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O), tl.program_id(1)
    inside_o, row, HALF = o < O, o.to(tl.int64)[:, None], STEP // 2
    values_ptrs = values_ptr + row * (P // 2) + step * HALF + tl.arange(0, STEP // 2)[None, :]
    values = tl.load(values_ptrs, mask=inside_o[:, None], other=0)
    weight = numbers(values, zero_ptr + o, step, inside_o, O, 4, ZEROS)
    tl.store(out_ptr + row * P + step * STEP + tl.arange(0, STEP)[None, :], weight, mask=inside_o[:, None])


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
def numbers(values, zero_ptrs, step, inside_o, O: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr):
    """Return a step's numbers ``[O, STEP]`` in 8 bits, in the order of the inputs, without moving any between threads:
    see ``Packed``. 4 bits become 16 times their number, or, with zero points, their difference."""
    if BITS == 8:
        return values
    else:
        if ZEROS:
            zero = number_of(zero_ptrs, step, O, inside_o, tl.uint8)
            low, high = _less(values, tl.broadcast_to(zero[:, None], values.shape))
        else:
            low, high = _sixteenfold(values)
        return in_order(low, high)


@triton.jit
def in_order(low, high):
    """Return the numbers of a step's bytes in the order of the inputs."""
    ROWS: tl.constexpr = low.shape[0]
    CHUNKS: tl.constexpr = low.shape[1] // 16
    parts = tl.reshape(tl.join(low, high), (ROWS, 4, CHUNKS, 4, 2))
    return tl.reshape(tl.permute(parts, (0, 2, 4, 1, 3)), (ROWS, 32 * CHUNKS))


@triton.jit
def _sixteenfold(values):
    """Return the low and high halves of bytes, in two's complement, times 16."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            SIXTEENFOLD, "=r,=r,r", [values], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        return (values << 4).to(tl.int8, bitcast=True), (values & 0xF0).to(tl.int8, bitcast=True)


@triton.jit
def _less(values, zero):
    """Return the low and high halves of bytes, minus ``zero``."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            LESS, "=r,=r,r,r", [values, zero], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        zero = zero.to(tl.int8)
        return (values & 15).to(tl.int8) - zero, (values >> 4).to(tl.int8) - zero


@triton.jit
def _add(
    weight,
    x,
    scale_ptrs,
    step,
    inside_o,
    sums,
    SCALES: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Return ``sums`` plus a step's products, times their scale if it is of a group."""
    if weight.dtype != tl.int8 and not GROUPED:
        return tl.dot(weight, x, sums)
    else:
        product = tl.dot(weight, x)
        if weight.dtype == tl.int8:
            high, low = tl.split(tl.reshape(product, (sums.shape[0], sums.shape[1], 2)))
            product = (high * 128 + low).to(tl.float32)
        if GROUPED:
            scale = number_of(scale_ptrs, step, SCALES, inside_o, SCALE).to(tl.float32)
            return tl.fma(product, tl.broadcast_to(scale[:, None], product.shape), sums)
        else:
            return sums + product


@triton.jit
def add_step(weight, x, sums):
    """Return ``sums`` plus a step's products, summed from zero: see ``experts.experts``. A plain addition would become
    the product's own."""
    product = tl.dot(weight, x, input_precision="ieee")
    return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), sums)


@triton.jit
def number_of(ptrs, group, each: tl.constexpr, inside_o, dtype: tl.constexpr):
    """Load the numbers of a group from words of 32 bits with one, two or four groups."""
    BITS: tl.constexpr = dtype.primitive_bitwidth
    GROUPS: tl.constexpr = 32 // BITS
    word = tl.load(ptrs + group // GROUPS * each, mask=inside_o, other=0) >> (group % GROUPS * BITS)
    return word.to(tl.core.get_int_dtype(BITS, signed=False)).to(dtype, bitcast=True)


@triton.jit
def _scaled(sums, unit, scale_ptrs, bias_ptrs, inside_o, GROUPED: tl.constexpr, BIAS: tl.constexpr):
    """Multiply the sums by their scales and add the bias."""
    if not GROUPED:
        sums *= tl.load(scale_ptrs, mask=inside_o, other=0).to(tl.float32)[:, None]
    if BIAS:
        bias = tl.load(bias_ptrs, mask=inside_o, other=0).to(tl.float32)
        return tl.fma(
            sums, tl.broadcast_to(unit[None, :], sums.shape), tl.broadcast_to(bias[:, None], sums.shape)
        )
    return sums * unit[None, :]
