"""The outputs of chosen experts on a GPU. Shapes: T tokens, H hidden size, E experts, K chosen for each token, I inner
size, P = T * K pairs of a token and one of its experts, X tiles of pairs with the same expert.

Tiles of pairs are multiplied by their expert's weights: each expert that a token chose is read once. Inputs are added
16 at a time in one order, that of ``words`` or of ``linear``, and a token's outputs in the order of its experts: its
bits depend neither on other tokens nor on how many there are. For few tokens the program that is the last to multiply
adds them.

Weights in FP8 are multiplied by inputs rounded to FP8, as by ``packed_linear``: a token's, and an expert's inner states
of a token. Others as in a file (``Packed``) become numbers of the activations' dtype, which holds them exactly, floats
of 4 bits with their scales, and activations are not rounded. A step's sum, from zero, is multiplied by the scale of
others than floats. That also ends the step's product: otherwise the next step could overwrite its registers, see
``running_products`` in ``tests/compiled_launches.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import cdiv, limits_of, next_power_of_2, tickets
from specserve_kernels.ops.experts.add import add_outputs, is_own
from specserve_kernels.ops.experts.route import pairs_of_tile
from specserve_kernels.ops.experts.streamed import streamed, streams
from specserve_kernels.ops.experts.words import (
    as_read,
    as_words,
    in_rows,
    load_words,
    weight_of_bytes,
    weight_of_nibbles,
)
from specserve_kernels.ops.layer.activation import activate
from specserve_kernels.ops.linear.floats import weight_of_floats
from specserve_kernels.ops.linear.packed import add_step, number_of, words_of
from specserve_kernels.ops.linear.quantize import round_inputs
from specserve_kernels.ops.pdl import let_next_begin, load_settled, overlap, take_turn, wait_for_inputs
from specserve_kernels.reference.experts.experts import ExpertWeights
from specserve_kernels.reference.experts.route import Routes
from specserve_kernels.reference.layer.activation import GATES, Gate
from specserve_kernels.reference.linear.packed import STEP, Packed
from specserve_kernels.reference.linear.quantize import FP8, Rounded, given

FEW_TOKENS = 16  # whose outputs are added by the launch that computes them
FEW_TILES = 8  # of small ones, fewer programs than a device has room for
BLOCK_H = 1024  # hidden channels of a program that adds outputs
PLAIN = {
    "BITS": 16,
    "FLOATS": 0,
    "FP8": False,
    "TOTAL": 0,
    "SCALES": 0,
    "ROWS": 1,
    "GROUPED": False,
    "SCALE": tl.float32,
    "STAGES": 0,
}
"""The format of a weight that is not ``Packed``: bits, inputs of a group of floats, whether it is FP8, rows of all
experts, scales of a group of inputs, outputs of a scale, whether groups have different ones, their dtype, and steps of
FP8 in flight."""


class Block(NamedTuple):
    """Of a program: outputs, inputs of a step, warps, stages, and most registers of a thread."""

    outputs: int
    inputs: int
    warps: int
    stages: int
    registers: int | None = None


def blocks_for(pairs: int, element_size: int) -> tuple[Block, Block]:
    """Choose the launches of gates, which have as many rows again, and of outputs, for tiles of this many pairs. Two
    programs of small tiles have room on a multiprocessor: one reads while the other begins or ends."""
    if pairs == 16:
        return Block(32, 128, 4, 4), Block(64, 128, 4, 4)
    if pairs == 32:
        stages = 5 if element_size == 2 else 3
        return Block(64, 64, 4, stages), Block(128, 64, 4, stages)
    block = Block(64, 64, 4, 4) if pairs == 64 else Block(128, 64, 8, 3 if element_size == 2 else 2)
    return block, block


def packed_blocks_for(pairs: int, tiles: int, floats: int, element_size: int) -> tuple[Block, Block]:
    """Choose them for weights of 8 and 4 bits, whose steps are their own, where ``streamed`` does not serve. If inputs
    are FP8, tensor cores take both as they are. Otherwise a warp reads at least 16 rows, and registers hold each sum
    twice; two programs of 64 pairs have room, and one multiplies while the other converts. Of floats, warps of small
    tiles wait for fewer others, and few tiles are shared by more programs."""
    if element_size == 1:
        if pairs == 16:
            return Block(32, 0, 4, 8), Block(64, 0, 4, 3)
        warps, stages = (4, 5) if pairs == 32 else (8, 4)
        return Block(64, 0, warps, stages), Block(128, 0, warps, stages)
    stages = (6 if pairs <= 32 else 5) - element_size
    if floats and pairs == 16 and element_size == 2:
        rows = 64 if tiles <= FEW_TILES else 128
        return Block(rows // 2, 0, 4, stages), Block(rows, 0, 4, stages)
    registers = 128 if pairs in (32, 64) and element_size == 2 else None
    return Block(64, 0, 8, stages, registers), Block(128, 0, 8, stages, registers)


def run_experts(
    x_TH: Tensor | Rounded,
    routes: Routes,
    experts: ExpertWeights,
    gate: Gate,
    shared_TH: Tensor | None = None,
    first: int = 0,
    total: int | None = None,
) -> Tensor:
    """Same as the reference, summed in float32. The routes have the tiles of ``route`` on a GPU."""
    assert routes.tiles is not None
    read, x_TH = x_TH, given(x_TH)
    tokens, size = x_TH.shape
    own, inner = experts.sizes(size)
    count = own if total is None else total
    pairs, chosen = routes.expert_TK.numel(), routes.expert_TK.shape[1]
    order_P, tile_X3 = routes.tiles
    tile, tiles, few = pairs_of_tile(pairs, count), len(tile_X3) - 1, tokens <= FEW_TOKENS
    used = own * (1 - (1 - 1 / count) ** (next_power_of_2(tokens) * chosen))  # experts that are expected
    shape = {"E": count, "OWN": own, "K": chosen, "I": inner, "H": size, "BLOCK_P": tile, **overlap()}
    x, kernel, weights, options, outputs = _launch(
        experts.gate_up, inner, tile, tiles, used, read, gates=True
    )
    inner_PI = x_TH.new_empty((pairs, inner))
    kernel[(tiles * options.get("PIECES", 1), cdiv(inner, outputs))](
        x,
        *weights,
        experts.gate_up_bias_EO,
        order_P,
        tile_X3,
        inner_PI,
        x.stride(0),
        first,
        GATED=GATES.index(gate),
        **shape,
        **options,
    )
    x, kernel, weights, options, outputs = _launch(
        experts.down, size, tile, tiles, used, inner_PI, gates=False
    )
    made_PH = x_TH.new_empty((pairs, size), dtype=torch.float32)
    out_TH = x_TH.new_empty((tokens, size))
    blocks = cdiv(size, outputs)
    kernel[(tiles * options.get("PIECES", 1), blocks)](
        x,
        *weights,
        experts.down_bias_EH,
        order_P,
        tile_X3,
        made_PH,
        routes.expert_TK,
        routes.weight_TK,
        shared_TH,
        out_TH,
        tickets(blocks, x_TH.device) if few else order_P,
        tokens,
        tiles,
        x.stride(0),
        first,
        ADDED=max(16, next_power_of_2(tokens)) if few else 0,
        **shape,
        **options,
    )
    if not few:
        _add_kernel[(tokens * cdiv(size, BLOCK_H),)](
            made_PH,
            routes.expert_TK,
            routes.weight_TK,
            shared_TH,
            out_TH,
            first,
            E=count,
            OWN=own,
            K=chosen,
            H=size,
            BLOCK=BLOCK_H,
            **overlap(),
        )
    return out_TH


def _launch(
    weight: Tensor | Packed,
    width: int,
    tile: int,
    tiles: int,
    used: float,
    read: Tensor | Rounded,
    gates: bool,
) -> tuple[Tensor, Any, tuple[Tensor | None, ...], dict[str, Any], int]:
    """Return the inputs of a launch for ``width`` outputs of each expert, its kernel, the numbers, scales, zero points
    and units, its constants, and the outputs of a program."""
    x, unit, is_fp8 = given(read), None, isinstance(weight, Packed) and weight.values.dtype == FP8
    if is_fp8:
        if isinstance(read, Tensor) or read.values.dtype != FP8:
            read = round_inputs(x, FP8)
        x, unit = read.values, read.unit_GT
    if isinstance(weight, Packed):
        assert weight.stacked or weight.floats or weight.bits == 8
        if streams(weight, x, width):
            return x, *streamed(weight, tile, used * width / limits_of(x.device).processors, gates)
        blocks = packed_blocks_for(tile, tiles, weight.floats, x.element_size())
    else:
        blocks = blocks_for(tile, x.element_size())
    kernel, block = (_gate_up_kernel, blocks[0]) if gates else (_down_kernel, blocks[1])
    options: dict[str, Any] = {
        "BLOCK_O": block.outputs,
        "BLOCK_I": block.inputs,
        "WARPS": block.warps,
        "num_warps": block.warps,
        "maxnreg": block.registers,
        "num_stages": block.stages,
    }
    if isinstance(weight, Tensor):
        return x, kernel, (weight, None, None, None), options | PLAIN, block.outputs
    scale, zero, values = weight.scale_WSN, weight.zero_WON, weight.values
    rows, size = block.outputs * (2 if gates else 1), x.element_size()
    step_bytes = weight.step * (tile * size + rows * weight.bits // 8)
    # Before Hopper, what zero points are taken from moves between threads.
    room = limits_of(x.device).shared_bytes - (0 if zero is None else rows * weight.step * size)
    stages = min(block.stages * min(2, STEP // weight.step), (not is_fp8) + room // step_bytes)
    options |= {
        "BLOCK_I": weight.step,
        "num_stages": min(stages, 1 + cdiv(weight.inputs, weight.step)) if is_fp8 else stages,
        "BITS": weight.bits,
        "FLOATS": weight.floats,
        "FP8": is_fp8,
        "TOTAL": len(values),
        "SCALES": scale.shape[1],
        "ROWS": weight.rows,
        "GROUPED": weight.grouped,
        "SCALE": getattr(tl, "int32" if weight.floats else str(scale.dtype).removeprefix("torch.")),
    }
    options["STAGES"] = options["num_stages"]
    scale, zero = words_of(scale) if weight.grouped else scale, None if zero is None else words_of(zero)
    if is_fp8:
        return x, kernel, (values, scale, None, unit), options, block.outputs
    return x, kernel, (words_of(values), scale, zero, weight.unit_O), options, block.outputs


@triton.jit(do_not_specialize=["first_expert"])
def _gate_up_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [E, 2 * I, H], in 8 bits [E * 2 * I, padded H], in 4 bits half of it
    scale_ptr,  # as in ``packed_linear``, or None
    zero_ptr,  # likewise
    unit_ptr,  # float32, of each row, or if FP8 of each input's, or None
    bias_ptr,  # [E, 2 * I]
    order_ptr,  # [P]
    tile_ptr,  # [X + 1, 3]
    out_ptr,  # [P, I], sorted
    stride,
    first_expert,
    GATED: tl.constexpr,
    E: tl.constexpr,
    OWN: tl.constexpr,  # experts from the first on, whose weights these are
    K: tl.constexpr,
    I: tl.constexpr,
    H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WARPS: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    FP8: tl.constexpr,
    TOTAL: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    FORMAT: tl.constexpr = (BLOCK_I, BITS, FLOATS, FP8, TOTAL, SCALES, ROWS, GROUPED, SCALE, WARPS, STAGES)
    p, o, h = tl.arange(0, BLOCK_P), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_I)
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    tile_ptrs = tile_ptr + tl.program_id(0) * 3
    expert, first, end = tl.load(tile_ptrs) - first_expert, tl.load(tile_ptrs + 1), tl.load(tile_ptrs + 2)
    if is_own(expert, E, OWN):
        here = first + p < end
        token = tl.load(order_ptr + first + p, mask=here, other=0) // K
        there = o < I
        if BITS == 16:
            row = expert.to(tl.int64) * (2 * I) + o
            gate, up = _gates(weight_ptr, x_ptr, token, stride, row, row + I, there, here, h, H, BLOCK_I)
            if bias_ptr is not None:
                gate = _add_bias(gate, bias_ptr + row, there)
                up = _add_bias(up, bias_ptr + row + I, there)
        else:
            stored = weight_ptr, scale_ptr, zero_ptr, unit_ptr, bias_ptr
            steps: tl.constexpr = (H + BLOCK_I - 1) // BLOCK_I
            sums = _packed_sums(
                stored, x_ptr, token, stride, here, expert, True, steps, 2, I, H, BLOCK_O, FORMAT
            )
            gate, up = tl.split(tl.permute(tl.reshape(sums, (2, BLOCK_O, BLOCK_P)), (1, 2, 0)))
        out_ptrs = out_ptr + (first + p).to(tl.int64)[None, :] * I + o[:, None]
        _store_gated(gate, up, out_ptrs, here[None, :] & there[:, None], GATED)


@triton.jit
def _gates(
    weight_ptr,
    x_ptr,
    token,
    stride,
    gate_row,
    up_row,
    there,
    here,
    h,
    H: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Return the products of tokens and two plain rows for each output, ``[O, P]`` each."""
    gate = tl.zeros((gate_row.shape[0], token.shape[0]), tl.float32)
    up = gate
    for step in range(0, (H + BLOCK_I - 1) // BLOCK_I):
        at = step * BLOCK_I + h
        x_ptrs = x_ptr + token.to(tl.int64)[None, :] * stride + at[:, None]
        x = tl.load(x_ptrs, mask=here[None, :] & (at < H)[:, None], other=0)
        gate = _add_plain(weight_ptr, gate_row, there, at, x, gate, H)
        up = _add_plain(weight_ptr, up_row, there, at, x, up, H)
    return gate, up


@triton.jit
def _store_gated(gate, up, out_ptrs, there, GATED: tl.constexpr):
    dtype: tl.constexpr = out_ptrs.dtype.scalar.element_ty
    tl.store(out_ptrs, activate(gate.to(dtype), up.to(dtype), GATED), mask=there)


@triton.jit(do_not_specialize=["tickets_ptr", "tokens", "tiles", "first_expert"])
def _down_kernel(
    inner_ptr,  # [P, I], sorted
    weight_ptr,  # [E, H, I], in 8 bits [E * H, padded I], in 4 bits half of it
    scale_ptr,  # as in ``packed_linear``, or None
    zero_ptr,  # likewise
    unit_ptr,  # float32, of each row, or if FP8 of each input's, or None
    bias_ptr,  # [E, H]
    order_ptr,  # [P]
    tile_ptr,  # [X + 1, 3]
    made_ptr,  # [P, H]
    expert_ptr,  # [T, K]
    share_ptr,  # [T, K]
    shared_ptr,  # [T, H], or None
    out_ptr,  # [T, H]
    tickets_ptr,  # int32, 0, for each block of outputs, if ADDED
    tokens,
    tiles,
    stride,
    first_expert,
    ADDED: tl.constexpr,
    E: tl.constexpr,
    OWN: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,
    H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WARPS: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    FP8: tl.constexpr,
    TOTAL: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``ADDED``: at least the number of tokens if this launch adds their outputs, otherwise 0. Finds its tile before it
    waits: one or two launches before made the inner states, the one before those the tiles."""
    FORMAT: tl.constexpr = (BLOCK_I, BITS, FLOATS, FP8, TOTAL, SCALES, ROWS, GROUPED, SCALE, WARPS, STAGES)
    p, o, i = tl.arange(0, BLOCK_P), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_I)
    tile_ptrs = tile_ptr + tl.program_id(0) * 3
    expert = load_settled(tile_ptrs, True, 0)
    known = expert < E
    first, end = load_settled(tile_ptrs + 1, known, 0), load_settled(tile_ptrs + 2, known, 0)
    here = first + p < end
    pair = load_settled(order_ptr + first + p, here, 0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)
    if expert < E:
        steps, own = (I + BLOCK_I - 1) // BLOCK_I, expert < E
        if OWN < E:  # a tile of another rank's expert takes its ticket alone
            expert -= first_expert
            own = is_own(expert, E, OWN)
            here, steps = here & own, tl.where(own, steps, 0)
        if BITS == 16:
            x_ptrs = inner_ptr + (first + p).to(tl.int64)[None, :] * I
            row, there = expert.to(tl.int64) * H + o, (o < H) & own
            sums = tl.zeros((BLOCK_O, BLOCK_P), tl.float32)
            sums = _sums(weight_ptr, x_ptrs, row, there, here, i, steps, sums, I, BLOCK_I)
            if bias_ptr is not None:
                sums = _add_bias(sums, bias_ptr + row, there)
        else:
            stored, at_p = (weight_ptr, scale_ptr, zero_ptr, unit_ptr, bias_ptr), first + p
            sums = _packed_sums(
                stored, inner_ptr, at_p, stride, here, expert, own, steps, 1, H, I, BLOCK_O, FORMAT
            )
        tl.store(made_ptr + pair[None, :] * H + o[:, None], sums, mask=here[None, :] & (o < H)[:, None])
        if ADDED:
            used = tl.load(tile_ptr + tiles * 3)
            tl.debug_barrier()
            arrived = tl.atomic_add(tickets_ptr + tl.program_id(1), 1, sem="acq_rel", scope="gpu") + 1
            if arrived == used:
                tl.store(tickets_ptr + tl.program_id(1), 0)
                t = tl.arange(0, ADDED)
                kept = made_ptr, expert_ptr, share_ptr, shared_ptr, out_ptr
                nothing = tl.zeros((ADDED, BLOCK_O), tl.float32)
                add_outputs(nothing, kept, t, o, t < tokens, o < H, first_expert, E, OWN, K, H)


@triton.jit
def _sums(weight_ptr, x_ptrs, row, there, here, i, steps, sums, INPUTS: tl.constexpr, BLOCK_I: tl.constexpr):
    """Return ``sums`` plus the products of inner states and plain rows, ``[O, P]``."""
    for step in range(0, steps):
        at = step * BLOCK_I + i
        x = tl.load(x_ptrs + at[:, None], mask=here[None, :] & (at < INPUTS)[:, None], other=0)
        sums = _add_plain(weight_ptr, row, there, at, x, sums, INPUTS)
    return sums


@triton.jit
def _add_plain(weight_ptr, row, there, at, x, sums, INPUTS: tl.constexpr):
    """Return ``sums`` plus the products of inputs ``x`` and some rows' weights."""
    weight_ptrs = weight_ptr + row[:, None] * INPUTS + at[None, :]
    weight = tl.load(weight_ptrs, mask=there[:, None] & (at < INPUTS)[None, :], other=0)
    return tl.dot(weight, x, sums, input_precision="ieee")


@triton.jit
def _packed_sums(
    stored,
    x_ptr,
    at_p,
    stride,
    here,
    expert,
    own,
    steps,
    HALVES: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Return the products of a tile's inputs and the weights of a program's outputs, with units and biases. An expert's
    weight has one or two halves of ``WIDTH`` rows, of each of which the result has ``BLOCK_O``."""
    STEP: tl.constexpr = FORMAT[0]
    BITS: tl.constexpr = FORMAT[1]
    WARPS: tl.constexpr = FORMAT[9]
    weight_ptr, scale_ptr, zero_ptr, unit_ptr, bias_ptr = stored
    r = tl.arange(0, HALVES * BLOCK_O)
    row, there = _rows(r, expert, own, HALVES, WIDTH, BLOCK_O)
    read, read_there = _rows(as_read(r, WARPS), expert, own, HALVES, WIDTH, BLOCK_O)
    x_ptrs = x_ptr + at_p.to(tl.int64)[None, :] * stride
    if FORMAT[3]:
        sums = _fp8_sums(stored, x_ptrs, unit_ptr + at_p, here, row, there, steps, INPUTS, FORMAT)
    else:
        sums = tl.zeros((HALVES * BLOCK_O, at_p.shape[0]), tl.float32)
        scale = _scales(scale_ptr, row, there, 0, steps, FORMAT)
        for step in range(0, steps):
            at = step * STEP + tl.arange(0, STEP)
            x = tl.load(x_ptrs + at[:, None], mask=here[None, :] & (at < INPUTS)[:, None], other=0)
            words = load_words(weight_ptr, read, read_there, step, INPUTS, STEP, BITS)
            after = _scales(scale_ptr, row, there, step + 1, steps, FORMAT)
            sums = _add_packed(words, scale_ptr, zero_ptr, read, read_there, step, x, sums, scale, FORMAT)
            scale = after
        if unit_ptr is not None:
            sums *= tl.load(unit_ptr + row, mask=there, other=0)[:, None]
    if bias_ptr is not None:
        sums = _add_bias(sums, bias_ptr + row, there)
    return sums


@triton.jit
def _fp8_sums(stored, x_ptrs, unit_ptrs, here, row, there, steps, INPUTS: tl.constexpr, FORMAT: tl.constexpr):
    """Return the products with weights in FP8."""
    STEP: tl.constexpr = FORMAT[0]
    GROUPED: tl.constexpr = FORMAT[7]
    WIDTH: tl.constexpr = (INPUTS + STEP - 1) // STEP * STEP
    weight_ptr, scale_ptr, _, _, _ = stored
    sums = tl.zeros((row.shape[0], here.shape[0]), tl.float32)
    for step in tl.range(0, steps, num_stages=FORMAT[10]):  # with which scales are prefetched, too
        at = step * STEP + tl.arange(0, STEP)
        weight = tl.load(weight_ptr + row[:, None] * WIDTH + at[None, :], mask=there[:, None], other=0.0)
        x = tl.load(x_ptrs + at[:, None], mask=here[None, :] & (at < INPUTS)[:, None], other=0.0)
        if GROUPED:
            product = tl.dot(weight, x)
            scale = _scales(scale_ptr, row, there, step, steps, FORMAT)
            sums = tl.fma(product, tl.broadcast_to(scale[:, None], product.shape), sums)
        else:
            sums = tl.dot(weight, x, sums)
    sums *= tl.load(unit_ptrs, mask=here, other=0)[None, :]
    return sums if GROUPED else sums * _scales(scale_ptr, row, there, 0, steps, FORMAT)[:, None]


@triton.jit
def _rows(r, expert, own, HALVES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_O: tl.constexpr):
    """Return which rows of all experts' weights those of a program's block are, and whether they exist."""
    o = tl.program_id(1) * BLOCK_O + r % BLOCK_O
    return (expert.to(tl.int64) * HALVES + r // BLOCK_O) * WIDTH + o, (o < WIDTH) & own


@triton.jit
def _add_packed(words, scale_ptr, zero_ptr, row, there, step, x, sums, scale, FORMAT: tl.constexpr):
    """Return ``sums`` plus the products of a step's inputs ``x`` and its weight, of the rows that ``words`` are."""
    BITS: tl.constexpr = FORMAT[1]
    GROUP: tl.constexpr = FORMAT[2]  # of floats of 4 bits
    TOTAL: tl.constexpr = FORMAT[4]
    WARPS: tl.constexpr = FORMAT[9]
    if BITS == 4:  # of one box
        words = tl.reshape(words, (words.shape[1], words.shape[2]))
    if GROUP:
        weight = weight_of_floats(words, scale_ptr + row, there, step, TOTAL, GROUP, x.dtype)
        return add_step(in_rows(weight, WARPS), x, sums)
    else:
        if BITS == 8:
            weight = weight_of_bytes(words, x.dtype)
        elif zero_ptr is not None:
            zero = number_of(zero_ptr + row, step, TOTAL, there, tl.uint8)
            weight = weight_of_nibbles(words, zero.to(tl.int32), True, x.dtype)
        else:
            weight = weight_of_nibbles(words, tl.full(row.shape, 8, tl.int32), False, x.dtype)
        x = as_words(x) if BITS == 8 else x
        product = tl.dot(in_rows(weight, WARPS), x, input_precision="ieee")
        return tl.fma(product, tl.broadcast_to(scale[:, None], product.shape), sums)


@triton.jit
def _scales(scale_ptr, row, there, step, steps, FORMAT: tl.constexpr):
    """Load a step's scales of integers and FP8: a step before, because Triton prefetches only what is multiplied."""
    GROUP: tl.constexpr = FORMAT[2]
    SCALES: tl.constexpr = FORMAT[5]
    ROWS: tl.constexpr = FORMAT[6]
    GROUPED: tl.constexpr = FORMAT[7]
    SCALE: tl.constexpr = FORMAT[8]
    if GROUP:
        return tl.zeros((1,), tl.float32)
    elif GROUPED:
        ptrs, there = scale_ptr + row // ROWS, there & (step < steps)
        return number_of(ptrs, step, SCALES, there, SCALE).to(tl.float32)
    else:
        return tl.load(scale_ptr + row // ROWS, mask=there, other=0).to(tl.float32)


@triton.jit
def _add_bias(sums, ptrs, there):
    """A plain addition would become the product's, before all others, where there is one step: see ``add_step``."""
    bias = tl.load(ptrs, mask=there, other=0).to(tl.float32)
    return tl.fma(sums, tl.full(sums.shape, 1.0, tl.float32), tl.broadcast_to(bias[:, None], sums.shape))


@triton.jit(do_not_specialize=["first_expert"])
def _add_kernel(
    made_ptr,  # [T, K, H]
    expert_ptr,  # [T, K]
    share_ptr,  # [T, K]
    shared_ptr,  # [T, H]
    out_ptr,  # [T, H]
    first_expert,
    E: tl.constexpr,
    OWN: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    t = tl.program_id(0) // BLOCKS + tl.arange(0, 1)
    h = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    take_turn(OVERLAP)
    kept = made_ptr, expert_ptr, share_ptr, shared_ptr, out_ptr
    nothing = tl.zeros((1, BLOCK), tl.float32)
    add_outputs(nothing, kept, t, h, t >= 0, h < H, first_expert, E, OWN, K, H)
