"""Device functions that adjust a block of logits (penalties, bias, noise), and integer keys that order floats.

They return no NaN: a logit that is NaN, or becomes NaN through penalties and bias, counts as -inf.

Floats compare as int32 keys of the same order. A score and its column pack into one int64, whose maximum is the argmax
with ties to the lowest column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specserve_kernels.ops.pdl import load_settled
from specserve_kernels.ops.sampling.philox import gumbel, words_in_order, words_of

NOTHING = tl.constexpr(-(2**63))  # below every packed score
LOWEST = tl.constexpr(-2139095041)  # the key of -inf
_BIAS_CHUNK = tl.constexpr(64)


@triton.jit
def without_nan(x):
    return tl.maximum(x, float("-inf"))  # the maximum ignores NaN


@triton.jit
def scaled(x, temperature):
    """Return logits over the temperature, rounded as in the reference; infinite ones stay."""
    s = tl.div_rn(x, temperature + tl.zeros_like(x))
    return tl.where(s == s, s, x)


@triton.jit
def order_of(x):
    """Return int32 keys in the order of float32 x (no NaN), with equal keys for both zeros."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Return the float32 of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(x, column, valid):
    """Return int64 keys in the order of x, with ties to the lowest column."""
    key = (order_of(x).to(tl.int64) << 32) | (0xFFFFFFFF - column.to(tl.int64))
    return tl.where(valid, key, NOTHING)


@triton.jit
def packed_value(packed):
    return value_of((packed >> 32).to(tl.int32))


@triton.jit
def packed_column(packed):
    return 0xFFFFFFFF - (packed & 0xFFFFFFFF)


@triton.jit
def request_of(n, rows, path, path_size, table, width, entries):
    """Read a node's parameters before the launch's turn: temperature, and those of penalties, bias, noise and
    truncation. ``placed`` adds what depends on its position."""
    r = load_settled(rows + n, True, 0)
    history = (table[13] + r * width, table[14] + r * width, path + n.to(tl.int64) * path_size, path_size)
    penalty = (_entry(table[4], r), _entry(table[5], r), _entry(table[6], r))
    lists = (table[9] + r * entries, table[10] + r * entries, table[11] + r * entries)
    bias = _entry(table[12], r).to(tl.int32)
    noise = (_entry(table[8], r), _entry(table[7], r))
    cut = (_entry(table[1], r), _entry(table[2], r), _entry(table[3], r))
    return _entry(table[0], r), penalty, history, bias, lists, noise, cut


@triton.jit
def _entry(column, r):
    return load_settled(column + r, True, 0)


@triton.jit
def placed(position, bias, noise):
    """Return the parameters of bias and noise of a token after this position."""
    at = tl.load(position) + 1
    return (bias, at), (at, noise[0], noise[1])


@triton.jit
def truncates_row(temperature, cut):
    return (temperature > 0) & ((cut[0] > 0) | (cut[1] < 1) | (cut[2] > 0))


@triton.jit
def plain_row(temperature, penalty, bias):
    """Return whether the row simply takes its largest logit."""
    return (temperature <= 0) & (bias <= 0) & (penalty[0] == 1) & (penalty[1] == 0) & (penalty[2] == 0)


@triton.jit
def _tokens(column, valid, ids, HAS_MAP: tl.constexpr):
    if HAS_MAP:
        return tl.load(ids + column, mask=valid, other=0).to(tl.int32)
    else:
        return column


@triton.jit
def _penalized(x, token, valid, penalty, history):
    """Apply penalties as ``reference.penalize`` does."""
    repetition, frequency, presence = penalty
    counts, in_prompt, path, path_size = history
    count = tl.load(counts + token, mask=valid, other=0)
    for a in range(path_size):
        count += (token == tl.load(path + a)).to(tl.int32)
    seen = (tl.load(in_prompt + token, mask=valid, other=0) != 0) | (count > 0)
    scaled = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    x = tl.where(seen, scaled, x) - frequency * count.to(tl.float32)
    return x - tl.where(count > 0, presence, 0.0)


@triton.jit
def _biased(x, column, start, bias, lists, inverse, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr):
    """Add biases as ``reference.add_bias`` does: lists are read in chunks, entries in this block are added one by
    one."""
    bias_count, at = bias
    ids, values, until = lists
    total = tl.zeros_like(x)
    index = tl.arange(0, _BIAS_CHUNK)
    for first in range(0, bias_count, _BIAS_CHUNK):
        here = first + index < bias_count
        where = tl.load(ids + first + index, mask=here, other=0)
        if HAS_MAP:
            where = tl.load(inverse + where, mask=here, other=0)
        here = here & (where >= start) & (where < start + BLOCK)
        here = here & (at < tl.load(until + first + index, mask=here, other=0))
        value = tl.load(values + first + index, mask=here, other=0)
        for _ in range(tl.sum(here.to(tl.int32), 0)):
            entry = tl.min(tl.where(here, index, _BIAS_CHUNK), 0)
            its = index == entry
            total += tl.where(
                column == tl.sum(tl.where(its, where, 0), 0), tl.sum(tl.where(its, value, 0.0), 0), 0.0
            )
            here = here & (index != entry)
    return x + total


@triton.jit
def adjusted(
    x,
    column,
    valid,
    start,
    penalty,
    history,
    bias,
    lists,
    ids,
    inverse,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return logits after penalties and bias, none of them NaN. Rows without either skip the work."""
    if (penalty[0] != 1) | (penalty[1] != 0) | (penalty[2] != 0):
        x = _penalized(x, _tokens(column, valid, ids, HAS_MAP), valid, penalty, history)
    if bias[0] > 0:
        x = _biased(x, column, start, bias, lists, inverse, HAS_MAP, BLOCK)
    return without_nan(x)


@triton.jit
def block_of(
    block, logits, size, penalty, history, bias, lists, ids, inverse, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return a block's adjusted logits, their columns, which of these exist, and the first column."""
    start = block * BLOCK
    column = start + tl.arange(0, BLOCK)
    valid = column < size
    x = tl.load(logits + column, mask=valid, other=float("-inf")).to(tl.float32)
    x = adjusted(x, column, valid, start, penalty, history, bias, lists, ids, inverse, HAS_MAP, BLOCK)
    return x, column, valid, start


@triton.jit
def perturbed(x, column, valid, start, temperature, noise, ids, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr):
    if temperature > 0:
        if HAS_MAP:
            word = words_of(_tokens(column, valid, ids, HAS_MAP), noise[0], noise[1], noise[2])
        else:
            word = words_in_order(start, noise[0], noise[1], noise[2], BLOCK)
        y = x + temperature * gumbel(word)
        x = tl.where(y == y, y, x)  # overflowing noise does not change an infinite logit
    return x
