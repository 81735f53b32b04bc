"""The Triton layer operations against their references: float32 under the interpreter, all dtypes on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specserve_kernels.ops.layer import activation, norm, rotary
from specserve_kernels.ops.layer import embed_and_concat as pairs
from specserve_kernels.ops.linear import choose, linear, packed, quantize, swap_ab
from specserve_kernels.reference.layer import activation as reference_activation
from specserve_kernels.reference.layer import embed_and_concat as reference_pairs
from specserve_kernels.reference.layer import norm as reference_norm
from specserve_kernels.reference.layer import rotary as reference_rotary
from specserve_kernels.reference.layer.activation import GATES, Gate
from specserve_kernels.reference.linear import linear as reference_linear
from specserve_kernels.reference.linear.packed import Numbers, pack
from specserve_kernels.reference.linear.quantize import FP8, LARGEST, PAIRED
from specserve_kernels.types import HeadNorms, KVScales
from torch import Tensor

from tests.reference import llama

GPU = torch.cuda.is_available()

# Three roundings apart at most; where the sum is ordered otherwise, the last digit of float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def assert_close(found: Tensor, expected: Tensor, times: int = 1) -> None:
    assert found.dtype == expected.dtype
    tolerance = times * TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 4096), (7, 24), (3, 100), (2, 2880), (5, 1), (1, 16384), (0, 64)]
)
def test_norms(draw, tokens: int, width: int) -> None:
    x, residual, weight = draw(tokens, width), draw(tokens, width), draw(width)
    x[:1] = 0
    residual[2:] *= 30
    given = x.clone(), residual.clone()
    assert_close(norm.rms_norm(x, weight, 1e-5), reference_norm.rms_norm(x, weight, 1e-5))
    out, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_close(out, expected)
    assert torch.equal(x, given[0])
    assert torch.equal(residual, given[1])


def test_norms_of_a_scaled_sum(draw) -> None:
    x, residual, weight, scale = draw(3, 100), draw(3, 100), draw(100), draw(1)
    out, total = norm.add_rms_norm(x, residual, weight, 1e-5, None, scale)
    expected, expected_total = reference_norm.add_rms_norm(x, residual, weight, 1e-5, None, scale)
    assert torch.equal(total, expected_total)
    assert torch.equal(expected_total, (x + residual) * scale)
    assert_close(out, expected)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("tokens", "width"), [(1, 3840), (7, 100), (2, 1152), (0, 64)])
def test_a_norm_before_the_sum_changes_no_bits(draw, tokens: int, width: int, wide: bool) -> None:
    """Against one launch after the other; on a GPU if the product is rounded, otherwise it is with the sum."""
    x, residual, scale = draw(tokens, width), draw(tokens, width), draw(1)
    first, weight = (each.float() if wide else each for each in (draw(width), draw(width)))
    dtypes = [x.dtype] if GPU else [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        x, residual, scale = x.to(dtype), residual.to(dtype), scale.to(dtype)
        exact = not GPU or (wide and dtype.itemsize == 2)
        for version in (norm, reference_norm) if dtype == draw(1).dtype else (reference_norm,):
            for scales in (None, scale):
                found = version.add_rms_norm(x, residual, weight, 1e-6, first, scales)
                normed = version.rms_norm(x, first, 1e-6)
                expected = version.add_rms_norm(normed, residual, weight, 1e-6, None, scales)
                for one, other in zip(found, expected, strict=True):
                    if exact:
                        assert torch.equal(one, other)
                    else:  # sums near zero keep the error of their parts
                        assert_close(one, other, 4)
            if exact and width % 128 == 0:
                rounded, _ = version.add_rms_norm_rounded(x, residual, weight, 1e-6, torch.int8, first)
                again, _ = version.add_rms_norm_rounded(normed, residual, weight, 1e-6, torch.int8)
                assert torch.equal(rounded.values, again.values)


def test_norms_of_embeddings(draw) -> None:
    embedding, weight = draw(11, 100), draw(100)
    tokens = torch.tensor([10, 0, 3, 3], device=weight.device)
    out, embedded = norm.embed_rms_norm(tokens, embedding, weight, 1e-5)
    expected, rows = reference_norm.embed_rms_norm(tokens, embedding, weight, 1e-5)
    assert torch.equal(embedded, rows)
    assert torch.equal(rows, embedding[tokens])
    assert_close(out, expected)


def test_norms_of_slices(draw) -> None:
    wide, residual, weight = draw(5, 300), draw(5, 128), draw(96)
    x, residual = wide[:, 100:196], residual[:, 32:]
    assert_close(norm.rms_norm(x, weight, 1e-6), reference_norm.rms_norm(x, weight, 1e-6))
    out, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = reference_norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    assert_close(out, expected)
    out, total = norm.add_rms_norm(x[:1], residual[:1], weight, 1e-6)
    assert_close(out, expected[:1])


def test_row_does_not_depend_on_the_batch(draw) -> None:
    x, residual, weight = draw(9, 640), draw(9, 640), draw(640)
    out, _ = norm.add_rms_norm(x, residual, weight, 1e-5)
    for t in range(9):
        alone, _ = norm.add_rms_norm(x[t : t + 1], residual[t : t + 1], weight, 1e-5)
        assert torch.equal(alone[0], out[t])


@pytest.mark.parametrize(("heads", "size"), [(3, 128), (2, 100), (1, 64)])
@pytest.mark.parametrize("normed", [True, False])
def test_gates_of_heads(draw, heads: int, size: int, normed: bool) -> None:
    x, wide, weight = 3 * draw(5, heads * size + 8)[:, 8:], 3 * draw(5, 2 * heads, size), draw(size)
    given = x, wide[:, 1::2], (weight, 1e-6) if normed else None
    found = norm.gate_heads(*given, None)
    assert_close(found, reference_norm.gate_heads(*given, None), 4)
    alone = norm.gate_heads(x[2:3], wide[2:3, 1::2], given[2], None)
    assert torch.equal(alone[0], found[2])
    for dtype in (FP8, PAIRED, torch.int8):
        rounded, expected = norm.gate_heads(*given, dtype), quantize.round_inputs(found, dtype)
        if GPU and normed and dtype != torch.int8:  # who stores bytes adds squares in another order
            torch.testing.assert_close(rounded.unit_GT, expected.unit_GT, rtol=2**-6, atol=0)
            off = (rounded.plain_TI - expected.plain_TI).abs() / expected.unit_GT.T
            assert (off <= 2**-6 * LARGEST[dtype] + (32 if dtype == FP8 else 1)).all()
        else:
            assert torch.equal(rounded.values.float(), expected.values.float())
            assert torch.equal(rounded.unit_GT, expected.unit_GT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norms_with_a_wide_weight(draw, dtype: torch.dtype) -> None:
    """Rounded once, after the product with the weight."""
    x, weight = draw(7, 100).to(dtype), draw(100).float()
    expected = (llama.rms_norm(x.double(), weight.double(), 1e-5)).to(dtype)
    for found in (norm.rms_norm(x, weight, 1e-5), reference_norm.rms_norm(x, weight, 1e-5)):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=0, rtol=2e-3 if dtype == torch.float16 else 1e-5)
    if dtype == torch.float16:
        assert (norm.rms_norm(x, weight, 1e-5) == expected).float().mean() > 0.99


@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize(("tokens", "inner"), [(1, 1408), (3, 24), (4, 1025), (2, 1), (0, 8)])
def test_gates(draw, tokens: int, inner: int, gated: Gate) -> None:
    gate_up = 4 * draw(tokens, 2 * inner)
    expected = reference_activation.apply_gate(gate_up, gated)
    assert_close(activation.apply_gate(gate_up, gated), expected)
    strided = torch.cat([gate_up, gate_up], dim=1)[:, : 2 * inner]
    assert_close(activation.apply_gate(strided, gated), expected)


@pytest.mark.parametrize("width", [24, 1000])
def test_gates_of_rows(draw, width: int) -> None:
    rows, x, weight = draw(3, width + 8)[:, 8:], draw(3, width + 8)[:, :-8], draw(1, width) / width**0.5
    found = activation.gate_rows(rows, x, weight)
    assert_close(found, reference_activation.gate_rows(rows, x, weight), 4)
    assert torch.equal(activation.gate_rows(rows[2:], x[2:], weight)[0], found[2])


@pytest.mark.parametrize("gated", GATES)
def test_large_gates(draw, gated: Gate) -> None:
    gate_up = draw(1, 8)
    gate_up[0] = torch.tensor([-80.0, -20.0, 80.0, 20.0, 3.0, 3.0, 3.0, 3.0])
    found = activation.apply_gate(gate_up, gated)
    assert_close(found, reference_activation.apply_gate(gate_up, gated))


@pytest.mark.parametrize("gated", GATES[1:])
def test_all_kernels_gate_with_the_same_bits(draw, gated: Gate) -> None:
    """Products with an identity, which are exact: the numbers of an int8 weight as gates and what they multiply."""
    device = draw(1).device
    size, dtype = (64, torch.float16) if device.type == "cpu" else (256, torch.bfloat16)
    x = torch.eye(size, device=device, dtype=dtype)
    values = (draw(2 * size, size).float() * 40).round().clamp(-127, 127).to(torch.int8)
    scale = torch.full((2 * size, 1), 2.0**-5, device=device)
    weight = (values.float() * scale).to(dtype)
    expected = activation.apply_gate(weight.T.contiguous(), gated)
    found = torch.cat([linear.linear_few(each, weight, gated) for each in x.split(16)])
    assert torch.equal(found, expected)
    found = torch.cat([swap_ab.swap_ab_linear(each, weight, gated) for each in x.split(64)])
    assert torch.equal(found, expected)
    stored = pack(Numbers(values, scale))
    found = packed.packed_linear(x, stored, None, gated)
    assert torch.equal(found, expected)
    rounded = packed.gate_rounded(x, stored, None, PAIRED, gated)
    again = quantize.round_gated(weight.T.contiguous(), PAIRED, gated)
    for each in (rounded, again):
        assert torch.equal(each.values, quantize.round_inputs(expected, PAIRED).values)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated", "interleaved"),
    [
        *((4, 1, 32, 32, True), (6, 2, 64, 64, False), (32, 8, 128, 128, False), (3, 3, 256, 256, False)),
        *((0, 1, 128, 64, True), (0, 8, 64, 16, False), (2, 1, 96, 24, True), (25, 5, 8, 6, False)),
    ],
)
def test_rotary_store_kv(
    draw, page_size: int, heads: int, kv_heads: int, head_dim: int, rotated: int, interleaved: bool
) -> None:
    tokens, pages = 4, 200 // page_size
    cache = draw(pages, 2, page_size, kv_heads, head_dim)
    device, dtype = cache.device, cache.dtype
    qkv = draw(tokens, (heads + 2 * kv_heads) * head_dim + 16)[:, :-16]
    qkv = qkv.unflatten(1, (heads + 2 * kv_heads, head_dim))
    frequencies = torch.logspace(0, -2, rotated // 2, dtype=torch.float64)
    table = reference_rotary.rotary_table(frequencies, 50, 1.3, dtype).to(device)
    rope = table, torch.tensor([0, 49, 7, 7], device=device)
    place = torch.tensor([page_size + 3, 190, 1, 77], device=device).clamp(max=pages * page_size - 1)
    table_BM = torch.randperm(pages, device=device)[None]
    where = table_BM, place
    expected_qkv, expected_cache = qkv.clone(), cache.clone()
    pairs = {"interleaved": interleaved}
    expected = reference_rotary.rotary_store_kv(
        expected_qkv, *rope, kv_heads, expected_cache, *where, **pairs
    )
    unread, unread_cache = qkv.clone(), cache.clone()
    found = rotary.rotary_store_kv(unread, *rope, kv_heads, unread_cache, *where, keys=False, **pairs)
    assert_close(found, expected)
    assert_close(unread_cache, expected_cache)
    assert torch.equal(unread[:, heads:], qkv[:, heads:])
    found = rotary.rotary_store_kv(qkv, *rope, kv_heads, cache, *where, **pairs)
    assert found.shape == (tokens, heads, head_dim)
    assert found.data_ptr() == qkv.data_ptr() or heads == 0
    assert_close(found, expected)
    assert_close(qkv, expected_qkv)
    assert_close(cache, expected_cache)
    untouched = torch.ones(pages, page_size, dtype=torch.bool, device=device)
    untouched[table_BM[0, place // page_size], place % page_size] = False
    kept = [x.transpose(1, 2)[untouched] for x in (cache, expected_cache)]
    assert torch.equal(*kept), "nothing else has changed"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (3, 0, 32)])
def test_queries_with_gates(draw, heads: int, kv_heads: int, head_dim: int) -> None:
    """They are taken from between the gates, which stay."""
    given, cache = draw(4, 2 * heads + 2 * kv_heads, head_dim), draw(50, 2, 4, kv_heads, head_dim)
    at = torch.tensor([0, 8, 7, 7], device=given.device)
    where = draw(9, 2, 16), at, kv_heads, cache, torch.arange(50, device=given.device)[None], 9 * at + 1
    alone = reference_rotary.first_parts(given, kv_heads, 2)
    expected = rotary.rotary_store_kv(alone, *where)
    for version in (rotary, reference_rotary):
        qkv = given.clone()
        assert_close(version.rotary_store_kv(qkv, *where, query_parts=2), expected)
        assert torch.equal(qkv[:, : 2 * heads], given[:, : 2 * heads])
        assert_close(qkv[:, 2 * heads :], alone[:, heads:])


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"),
    [(4, 2, 32, 8), (0, 2, 96, 96), (3, 0, 64, 64), (17, 8, 256, 64)],
)
def test_norms_of_heads(
    draw, heads: int, kv_heads: int, head_dim: int, rotated: int, values: bool, wide: bool
) -> None:
    """As of each part by itself, before its rotation, of neighbours with a wide norm; in FP8, too."""
    cache, qkv, table = (
        draw(6, 2, 1, kv_heads, head_dim),
        draw(5, heads + 2 * kv_heads, head_dim),
        draw(9, 2, rotated),
    )
    at, pages = torch.tensor([3, 1, 4, 2, 5], device=qkv.device), torch.arange(6, device=qkv.device)[None]
    weights = [1 + 0.1 * draw(head_dim) for _ in range(2)]
    query, key = (each.float() for each in weights) if wide else weights
    norms = HeadNorms(query, key if kv_heads else None, 1e-6, values)
    ones = torch.ones_like(query)
    parts = zip(qkv.split([heads, kv_heads, kv_heads], 1), (query, key, ones), strict=True)
    normed = [
        llama.rms_norm(part.float(), (weight if wide else ones).float(), 1e-6).to(qkv.dtype)
        * (1 if wide else weight)
        for part, weight in parts
    ]
    normed[2] = normed[2] if values else qkv[:, heads + kv_heads :]
    for scales in (None, KVScales(0.3, 0.011)):
        stored = cache if scales is None else cache.to(torch.float8_e4m3fn)
        expected_qkv, expected = torch.cat(normed, 1), stored.clone()
        q_TND = reference_rotary.rotary_store_kv(
            expected_qkv, table, at, kv_heads, expected, pages, at, True, scales, None, wide
        )
        for function in (rotary.rotary_store_kv, reference_rotary.rotary_store_kv):
            for keys in (True, False):
                given, kept = qkv.clone(), stored.clone()
                found = function(given, table, at, kv_heads, kept, pages, at, keys, scales, norms, wide)
                assert_close(found, q_TND, 2)
                if scales is None:
                    assert_close(kept, expected, 2)
                else:
                    torch.testing.assert_close(kept.float(), expected.float(), atol=2**-9, rtol=0.13)
                if keys and scales is None:
                    assert_close(given, expected_qkv, 2)
                elif keys:
                    assert torch.equal(given[:, heads:], kept[at, :, 0].flatten(1, 2).to(qkv.dtype))


def test_keys_and_values_are_rounded_before_anybody_reads_them(draw) -> None:
    """To FP8: the cache and, where they are read, the heads hold the same numbers, each the nearest."""
    scales, kv_heads = KVScales(0.3, 0.011), 2
    qkv, table = draw(5, 3 + 2 * kv_heads, 32), draw(9, 2, 32)
    qkv[0, -1, :3] = torch.tensor([1e6, -1e6, 1e-9])  # beyond the largest and below the smallest
    at, pages = torch.tensor([3, 1, 4, 2, 5], device=qkv.device), torch.arange(6, device=qkv.device)[None]
    plain, cache = qkv.clone(), qkv.new_zeros(6, 2, 1, kv_heads, 32)
    q_TND = rotary.rotary_store_kv(plain, table, at, kv_heads, cache, pages, at)
    inverse = torch.tensor([1 / scales.key, 1 / scales.value], device=qkv.device)[:, None, None]
    wide = plain[:, 3:].float().unflatten(1, (2, kv_heads)) * inverse
    expected = wide.clamp(-448, 448).to(torch.float8_e4m3fn).to(qkv.dtype)
    for function in (rotary.rotary_store_kv, reference_rotary.rotary_store_kv):
        for keys in (True, False):
            given, stored = qkv.clone(), cache.to(torch.float8_e4m3fn)
            found = function(given, table, at, kv_heads, stored, pages, at, keys, scales)
            assert_close(found, q_TND)
            if function is reference_rotary.rotary_store_kv:  # whose sums are rounded in another way
                torch.testing.assert_close(stored[at, :, 0].to(qkv.dtype), expected, atol=2**-9, rtol=0.13)
                assert torch.equal(stored[at, 1, 0].to(qkv.dtype), expected[:, 1])
            else:
                assert torch.equal(stored[at, :, 0].to(qkv.dtype), expected)
            if keys:
                assert torch.equal(given[:, 3:].unflatten(1, (2, kv_heads)), stored[at, :, 0].to(qkv.dtype))


def test_rotary_of_no_tokens_and_of_a_shared_slot(draw) -> None:
    cache, qkv, table = draw(3, 2, 4, 2, 32), draw(3, 6, 32), draw(1, 2, 32)
    given = cache.clone()
    zeros = torch.zeros(3, dtype=torch.int64, device=cache.device)
    pages = torch.tensor([[2, 1]], device=cache.device)
    expected = reference_rotary.apply_rotary(qkv[:, :2], table[zeros])
    none = zeros[:0]
    assert rotary.rotary_store_kv(qkv[:0], table, none, 2, cache, pages, none).shape == (0, 2, 32)
    assert torch.equal(cache, given)
    assert_close(rotary.rotary_store_kv(qkv, table, zeros, 2, cache, pages, zeros - 1), expected)
    assert torch.equal(cache[1:], given[1:])
    assert torch.equal(cache[0, :, 1:], given[0, :, 1:])


@pytest.mark.parametrize("scales", [None, KVScales(0.3, 0.2)])
def test_rotary_of_queries_alone(draw, scales: KVScales | None) -> None:
    cache, qkv, table, at = draw(6, 2, 1, 2, 32), draw(5, 3, 32), draw(9, 2, 32), torch.arange(5)
    at, given, pages = at.to(cache.device), cache.clone(), torch.arange(6, device=cache.device)[None]
    expected = reference_rotary.apply_rotary(qkv, table[at])
    for function in (rotary.rotary_store_kv, reference_rotary.rotary_store_kv):
        assert_close(function(qkv.clone(), table, at, 0, cache, pages, at, scales=scales), expected)
    assert torch.equal(cache, given)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_rotary_beyond_two_to_the_31() -> None:
    pages, page_size, kv_heads, head_dim = 70_000, 16, 8, 128
    cache = torch.zeros(pages, 2, page_size, kv_heads, head_dim, dtype=torch.float16, device="cuda")
    assert cache.numel() > 2**31
    qkv = torch.randn(2, 12 + 16, head_dim, dtype=torch.float16, device="cuda")
    table = torch.randn(2, 2, head_dim, dtype=torch.float16, device="cuda")
    position = torch.arange(2, device="cuda")
    page, offset = torch.tensor([69_999, 65_537], device="cuda"), torch.tensor([15, 3], device="cuda")
    where = torch.arange(pages, device="cuda")[None], page * page_size + offset
    key, value = qkv[:, 12:20].clone(), qkv[:, 20:].clone()
    rotary.rotary_store_kv(qkv, table, position, kv_heads, cache, *where)
    assert torch.equal(cache[page, 1, offset], value)
    assert_close(cache[page, 0, offset], reference_rotary.apply_rotary(key, table))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("width", [96, 1000])
def test_pair_inputs(draw, width: int, gathered: bool, normed: bool) -> None:
    embedding, features = draw(11, width), draw(5, width + 24)[:, :width]
    tokens = torch.tensor([10, 0, 3, 3, 7], device=embedding.device)
    source = torch.tensor([4, 4, 0, 2, 1], device=embedding.device) if gathered else None
    norms = (draw(width), draw(width), 1e-5) if normed else None
    pair, found = pairs.pair_inputs(tokens, embedding, features, source, norms)
    expected = reference_pairs.pair_inputs(tokens, embedding, features, source, norms)
    assert_close(pair, expected[0])
    assert torch.equal(found, expected[1])
    assert gathered or found is features
    if not normed:
        assert torch.equal(pair, expected[0])


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 64, 512), (5, 40, 200), (37, 33, 1024)])
def test_linear(draw, tokens: int, outputs: int, inputs: int) -> None:
    x, weight = draw(tokens, inputs + 8)[:, :inputs], draw(outputs, inputs) / inputs**0.5
    if x.dtype == torch.float32:
        x, weight = x.half(), weight.half()
    found, bias = linear.linear_few(x, weight), draw(outputs).to(x.dtype)
    assert_close(found, torch.nn.functional.linear(x, weight))
    ahead = linear.linear_ahead(x, weight)
    assert_close(ahead, found)
    assert not GPU or torch.equal(ahead, found)
    assert_close(linear.linear_few(x, weight, bias_O=bias), torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize(("tokens", "inner", "inputs"), [(1, 64, 512), (5, 20, 200), (16, 33, 1024)])
def test_gated_linear(draw, tokens: int, inner: int, inputs: int) -> None:
    """The gate and what it lets through meet in one program; their sums are those of the plain projection."""
    x, weight = draw(tokens, inputs), 2 * draw(2 * inner, inputs) / inputs**0.5
    if x.dtype == torch.float32:
        x, weight = x.half(), weight.half()
    found = linear.linear_few(x, weight, "silu")
    assert_close(found, activation.apply_gate(linear.linear_few(x, weight), "silu"))
    bias = draw(2 * inner).to(x.dtype)
    expected = activation.apply_gate(torch.nn.functional.linear(x, weight, bias), "silu")
    assert_close(linear.linear(x, weight, bias, "silu"), expected)


@pytest.mark.parametrize("tokens", [9, 32, 60, 100])
@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 1024), (200, 2056), (512 + 24, 72)])
def test_swap_ab_linear(
    draw, outputs: int, inputs: int, gated: Gate, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of few outputs meet; ends of tokens, outputs and inputs; a place that is given."""
    monkeypatch.setattr(choose, "MANY_OUTPUTS", 512)
    x, weight = draw(tokens, inputs + 16)[:, 8 : inputs + 8], 2 * draw(outputs, inputs) / inputs**0.5
    if x.dtype == torch.float32:
        x, weight = x.half(), weight.half()
    expected = torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype)
    expected = activation.apply_gate(expected, gated)
    for out in (None, x.new_full((tokens + 1, expected.shape[1]), 7.0)):
        found = swap_ab.swap_ab_linear(x, weight, gated, None if out is None else out[:tokens])
        several = 4 * TOLERANCE[found.dtype]  # roundings
        torch.testing.assert_close(found, expected, atol=several, rtol=several)
        assert out is None or (out[tokens:] == 7).all()


def test_linear_into_a_place(draw) -> None:
    """Which one kernel or another writes to: 6,144 outputs fill the device with 20 tokens."""
    x, weight = draw(20, 1024), draw(6144, 1024) / 1024**0.5
    if x.dtype == torch.float32:
        x, weight = x.half(), weight.half()
    assert choose.for_plain(x, weight, None, False) == "swap_ab"
    for tokens in (3, 20):
        out = x.new_full((tokens + 1, 6144), 7.0)
        found = linear.linear(x[:tokens], weight, None, out_TO=out[:tokens])
        assert found.data_ptr() == out.data_ptr()
        several = 4 * TOLERANCE[found.dtype]
        expected = torch.nn.functional.linear(x[:tokens].float(), weight.float()).to(x.dtype)
        torch.testing.assert_close(found, expected, atol=several, rtol=several)
        assert (out[tokens:] == 7).all()


def test_a_place_that_is_wrong(draw) -> None:
    x, weight, bias = draw(3, 64), draw(72, 64), draw(72)
    out = x.new_empty(3, 72)
    wrong = [
        (bias, None, out),
        (None, "silu", out),
        (None, None, out[:2]),
        (None, None, x.new_empty(72, 3).T),
    ]
    for version in (linear.linear, reference_linear.linear):
        for given, gated, place in wrong:
            with pytest.raises(ValueError, match="out_TO: expected contiguous"):
                version(x, weight, given, gated, place)
