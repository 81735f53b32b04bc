"""What the kernels in Gluon share: how they load blocks with Hopper's copy engine, what tensor cores multiply, and what
is done with their sums. Shapes as in ``packed_linear``."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specserve_kernels.ops.linear.choose import ROWS_EACH as ROWS
from specserve_kernels.ops.linear.nibbles import LESS, SIXTEENFOLD

ROWS_EACH = gl.constexpr(ROWS)  # outputs that tensor cores multiply at once
BOX = gl.constexpr(128)  # bytes of a row that the copy engine brings at once
BYTES, WORDS_LAYOUT = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(0, 32, 1)
# Their names in Triton 3.9, and in 3.6.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def word_boxes(each_WON: Tensor) -> TensorDescriptor:
    """Describe the words of scales or zero points, for the copy engine to bring those of 64 outputs."""
    return TensorDescriptor.from_tensor(each_WON.view(torch.int32).flatten(), [ROWS_EACH.value], WORDS_LAYOUT)


@gluon.jit
def begin_after_last():
    """``take_turn`` of ``ops/pdl.py``, whose functions are not Gluon's."""
    _issue("griddepcontrol.wait; // dummy $0")
    _issue("griddepcontrol.launch_dependents; // dummy $0")


@gluon.jit
def _issue(ptx: gl.constexpr):
    gl.inline_asm_elementwise(ptx, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def operand(bytes, zero, MMA: gl.constexpr, ZEROS: gl.constexpr):
    """Return a step's 4-bit numbers in 8 bits, in the order that tensor cores take them from registers: see ``Packed``.
    A thread's bytes become its own numbers."""
    if ZEROS:
        zero, _ = gl.broadcast(zero.to(gl.uint8)[:, None], bytes)
        low, high = gl.inline_asm_elementwise(
            LESS, "=r,=r,r,r", [bytes, zero], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
        )
    else:
        low, high = gl.inline_asm_elementwise(
            SIXTEENFOLD, "=r,=r,r", [bytes], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
        )
    fours = gl.permute(gl.reshape(gl.join(low, high), (ROWS_EACH, 4, 4, 4, 2)), (0, 2, 4, 1, 3))
    return gl.convert_layout(gl.reshape(fours, (ROWS_EACH, BOX)), gl.DotOperandLayout(0, MMA, 4))


@gluon.jit
def of_tokens(product):
    """Return the product in float32, of integers with the two columns of a token joined."""
    if product.dtype == gl.int32:
        high, low = gl.split(gl.reshape(product, (product.shape[0], product.shape[1] // 2, 2)))
        return (high * 128 + low).to(gl.float32)
    else:
        return product


@gluon.jit
def scale_of(word, half, SCALE: gl.constexpr):
    """Return a word's scale, of two in 16 bits its first or second."""
    if SCALE.primitive_bitwidth == 32:
        return word.to(SCALE, bitcast=True)
    else:
        return ((word >> 16 * half) & 0xFFFF).to(gl.uint16).to(SCALE, bitcast=True).to(gl.float32)


@gluon.jit
def add_scaled(product, scale, sums):
    """Add the product of a group of inputs times each output's ``scale``, with one rounding."""
    return gl.fma(of_tokens(product), across(scale, sums), sums)


@gluon.jit
def across(each_O, like):
    """Repeat each output's number for all tokens."""
    spread, _ = gl.broadcast(each_O[:, None], like)
    return spread


@gluon.jit
def results(
    sums,
    o,
    unit,
    scale_ptr,
    bias_ptr,
    O: gl.constexpr,
    ROWS: gl.constexpr,
    GROUPED: gl.constexpr,
    BIAS: gl.constexpr,
    SIXTEENTHS: gl.constexpr,
):
    """Multiply sums ``[outputs, tokens]`` by their scales, ``unit`` those of tokens, and add the bias."""
    if SIXTEENTHS:
        unit *= 1 / 16
    if not GROUPED:
        sums *= gl.load(scale_ptr + o // ROWS, mask=o < O, other=0).to(gl.float32)[:, None]
    if BIAS:
        bias = gl.load(bias_ptr + o, mask=o < O, other=0).to(gl.float32)
        return gl.fma(sums, gl.broadcast(unit[None, :], sums)[0], across(bias, sums))
    return sums * unit[None, :]
