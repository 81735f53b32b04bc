"""Projections with a checkpoint's quantized weight: how it is ordered, how activations are rounded, and the kernel
against its reference, under the interpreter in float32, on a GPU in the types that are served."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from specserve_kernels import FP8, PAIRED, Gate, Numbers, Packed, Rounded, dequantize_packed, pack
from specserve_kernels.ops.device import H200, Limits, tickets
from specserve_kernels.ops.layer.norm import add_rms_norm, add_rms_norm_rounded
from specserve_kernels.ops.linear import choose
from specserve_kernels.ops.linear import packed as ops
from specserve_kernels.ops.linear.quantize import round_inputs
from specserve_kernels.reference.linear import floats
from specserve_kernels.reference.linear import packed as reference
from specserve_kernels.reference.linear import quantize as rounding
from torch import Tensor

GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 2**-8 if GPU else 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-8}
Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class Kind:
    """Of a weight. ``group`` 0: all inputs."""

    dtype: torch.dtype
    group: int = 0
    rows: int = 1
    zeros: bool = False
    scales: torch.dtype = torch.float32
    floats: bool = False

    def __str__(self) -> str:
        parts = (
            str(self.dtype)[6:],
            self.group or "all",
            self.rows,
            "zeros" if self.zeros else "",
            "floats" if self.floats else "",
            str(self.scales)[6:],
        )
        return "-".join(map(str, filter(None, parts)))

    def draw(self, outputs: int, inputs: int, device: torch.device) -> Numbers:
        """Numbers of all sizes, so that products are of about 1."""
        draws = torch.Generator().manual_seed(outputs + inputs)
        if self.dtype == FP8:
            largest = 60.0
            values = torch.randn(outputs, inputs, generator=draws).mul(largest).clamp(-448, 448).to(FP8)
        else:
            low, high, largest = (0, 16, 8.0) if self.dtype == torch.uint8 else (-128, 128, 74.0)
            values = torch.randint(low, high, (outputs, inputs), generator=draws).to(self.dtype)
        groups = -(-inputs // self.group) if self.group else 1
        rows = -(-outputs // self.rows)
        scale = (torch.rand(rows, groups, generator=draws) + 0.5) / largest / inputs**0.5
        if self.floats:  # scales of 4 bits, of outputs of several sizes
            scale, unit_O1 = (
                scale.mul(64).to(FP8).bfloat16(),
                2.0 ** (torch.arange(outputs)[:, None] % 3) / 64,
            )
            return Numbers(
                values.to(device), scale.to(device), None, self.group, floats=True, unit_O1=unit_O1.to(device)
            )
        zero = torch.randint(0, 16, (outputs, groups), generator=draws).to(device, torch.uint8)
        group = self.group or inputs
        return Numbers(
            values.to(device), scale.to(device, self.scales), zero if self.zeros else None, group, self.rows
        )


INT8, INT4 = torch.int8, torch.uint8
FP8_KINDS = [Kind(FP8), Kind(FP8, 128, 128), Kind(FP8, 64, 48)]
KINDS = [
    *FP8_KINDS,
    Kind(INT8),
    Kind(INT8, 128, 128),
    Kind(INT8, 32, scales=torch.bfloat16),
    Kind(INT4, 128),
    Kind(INT4, 64, zeros=True, scales=torch.bfloat16),
    Kind(INT4, 256, zeros=True, scales=torch.float16),
    Kind(INT4, 32),
    Kind(INT4),
    Kind(INT4, zeros=True),
    Kind(INT4, 16, floats=True),
    Kind(INT4, 32, floats=True),
]


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def by_hand(numbers: Numbers) -> Tensor:
    """The weight in float64, number by number."""
    values, scale, zero, group, rows, _, floats, unit = numbers
    e2m1 = [sign * each for sign in (1, -1) for each in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    found = torch.empty(values.shape, dtype=torch.float64)
    for o in range(values.shape[0]):
        for i in range(values.shape[1]):
            g = i // group if scale.shape[1] > 1 else 0
            taken = int(zero[o, g]) if zero is not None else 8 if values.dtype == INT4 else 0
            number = e2m1[values[o, i]] if floats else float(values[o, i]) - taken
            found[o, i] = number * float(scale[o // rows, g]) * (1 if unit is None else float(unit[o]))
    return found


@pytest.mark.parametrize(("outputs", "inputs"), [(5, 40), (34, 256), (3, 384)])
def test_ordering_loses_nothing(kind: Kind, outputs: int, inputs: int) -> None:
    numbers = kind.draw(outputs, inputs, torch.device("cpu"))
    packed = pack(numbers)
    assert torch.equal(reference.unpack(packed).values_OI.float(), numbers.values_OI.float())
    expected = by_hand(numbers)
    assert torch.equal(dequantize_packed(packed, torch.float64), expected)
    assert torch.equal(dequantize_packed(packed, torch.bfloat16), expected.float().bfloat16())
    ids = torch.tensor([outputs - 1, 0, 2])
    assert torch.equal(dequantize_packed(packed, torch.float64, ids), expected[ids])
    assert packed.values.nbytes == outputs * -(-inputs // packed.step) * packed.step * packed.bits // 8


def test_a_thread_reads_its_numbers_at_once() -> None:
    """Of a step of 128, bytes 16 to 32 are the second fours of all halves of thirty-twos."""
    values = torch.arange(128).view(1, 128) % 23 % 16
    packed = pack(Numbers(values.byte(), torch.ones(1, 1)))
    mine = [[32 * c + 16 * h + 4 + e for c in range(4) for e in range(4)] for h in range(2)]
    low, high = (packed.values[0, 16:32] >> shift & 15 for shift in (0, 4))
    assert (low.long() ^ 8).tolist() == values[0, mine[0]].tolist()
    assert (high.long() ^ 8).tolist() == values[0, mine[1]].tolist()


def test_groups_of_inputs_here_and_there(draw: Draw) -> None:
    """Column c of the values is input ``order[c]``."""
    numbers = Kind(INT4, 64, zeros=True).draw(67, 200, draw(1).device)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    packed = pack(numbers._replace(order_I=order.int().to(draw(1).device)))
    expected = torch.empty(67, 200, dtype=torch.float64)
    expected[:, order] = by_hand(numbers)
    assert torch.equal(dequantize_packed(packed, torch.float64).cpu(), expected)
    ids = torch.tensor([3, 66])
    assert torch.equal(dequantize_packed(packed, torch.float64, ids.to(draw(1).device)).cpu(), expected[ids])
    x = draw(5, 200)
    check(x, packed, draw(67))
    found = ops.packed_linear(x, packed).double().cpu()
    torch.testing.assert_close(found, x.double().cpu() @ expected.T, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("group", [16, 48, 192])
def test_groups_that_do_not_fit_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {group} inputs; accepted are 32, 64, "):
        pack(Kind(INT4, group).draw(2, 384, torch.device("cpu")))
    with pytest.raises(ValueError, match=f"groups of {3 * group} inputs; accepted are 16 and 32"):
        pack(Kind(INT4, 3 * group, floats=True).draw(2, 384, torch.device("cpu")))


def test_pairs_of_floats_come_to_their_places() -> None:
    """What the instructions for a word do finds the sign and the three bits of each number where bfloat16 has them."""
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    words = pack(Numbers(codes, torch.ones(64, 4), None, 32, floats=True)).values.view(torch.int32)
    word = words.view(64, 4, 4).long() & 0xFFFFFFFF  # outputs, threads, thirty-twos
    held = sum(1 << place for place in floats.PLACES[-1]) * 0x10001
    moved = [word << by | word >> (32 - by) for by in floats.TURNS] + [(word & held) * floats.SPREAD]
    found = torch.stack([each & 0x81C081C0 for each in moved], -1)
    numbers = torch.stack((found, found >> 16), -1) & 0xFFFF
    ordered = codes.view(64, 4, 4, 4, 2).permute(0, 3, 1, 2, 4).long()
    assert torch.equal(numbers, (ordered & 7) << 6 | (ordered & 8) << 12)


def test_scales_of_floats() -> None:
    """Within an output 24 powers of two apart, unless all of a group's numbers are 0. Those of other outputs don't
    matter."""
    values = torch.tensor([[8, 1], [9, 7]]).repeat_interleave(32, 1).byte()
    scale = 2.0 ** torch.tensor([[-40, 60], [-100, -76]])
    with patch.object(floats, "SLICE", 64):  # an output at a time
        packed = pack(Numbers(values, scale, None, 32, floats=True))
    wanted = torch.tensor([[0, 2.0**59], [-(2.0**-101), 6 * 2.0**-76]]).repeat_interleave(32, 1)
    assert torch.equal(dequantize_packed(packed, torch.float32), wanted)
    for other in (2.0**-75, -(2.0**-76), 33 * 2.0**-80):
        scale[1, 1] = other
        with pytest.raises(
            ValueError, match="scales of 4-bit floats must be positive, of 4 bits, and at most"
        ):
            pack(Numbers(values, scale, None, 32, floats=True))


def rounded(x: Tensor, weight: Packed) -> Tensor | Rounded:
    if weight.rounding is None:
        return x
    x = x if weight.order_I is None else x[:, weight.order_I.long()]
    return round_inputs(x, weight.rounding)


def check(x: Tensor, weight: Packed, bias: Tensor | None = None, gated: Gate = None) -> Tensor:
    """With the same rounded inputs. Gated, two sums are rounded before they are multiplied: each may be rounded the
    other way. Returns the outputs."""
    found = ops.packed_linear(x, weight, bias, gated)
    read, weight = rounded(x, weight), weight._replace(order_I=None)
    expected = reference.packed_linear(read, weight, bias, gated)
    assert found.dtype == x.dtype
    tolerance = (1 + (gated is not None and x.dtype != torch.float32)) * TOLERANCE[x.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    return found


@pytest.mark.parametrize("dtype", [FP8, PAIRED], ids=str)
@pytest.mark.parametrize(("tokens", "inputs"), [(0, 128), (1, 16), (7, 300), (3, 1024), (70, 2184)])
def test_inputs_are_rounded(draw: Draw, tokens: int, inputs: int, dtype: torch.dtype) -> None:
    """To the nearest number, or to one as near but for float32's rounding; rows have sizes of their own."""
    x = (
        draw(tokens, inputs + 8)[:, :inputs]
        * 10 ** torch.linspace(3, -3, tokens, device=draw(1).device)[:, None]
    )
    x = x.to(draw(1).dtype)
    x[1:2] = 0
    for found in (round_inputs(x, dtype), rounding.round_inputs(x, dtype)):
        assert found.values.shape == (tokens if dtype == FP8 else 2 * tokens, inputs)
        assert (found.unit_GT.shape, found.dtype) == ((1, tokens), x.dtype)
        largest = x.float().abs().amax(1) if tokens else x.new_zeros(0).float()
        unit = (largest / rounding.LARGEST[dtype]).clamp_min(1e-30)
        torch.testing.assert_close(found.unit_GT[0], unit, rtol=1e-6, atol=0)
        check_nearest(found, x.double(), 1.0001)


def check_nearest(found: Rounded, x: Tensor, slack: float) -> None:
    """Numbers are at most half of the distance between neighbours away. float32 has seven digits of a quotient."""
    unit_T1 = found.unit_GT[0, :, None].double()
    scaled, numbers = x / unit_T1, found.plain_TI.double() / unit_T1
    fp8 = found.values.dtype == FP8
    at_most = (scaled.abs() / 16).clamp_min(2.0**-10) if fp8 else 0.5 + scaled.abs() * 2.0**-22
    error = (numbers - scaled).abs()
    assert bool((error <= slack * at_most).all()), (error - at_most).max()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [FP8, INT8, INT4], ids=str)
def test_what_is_not_finite_stays_visible(draw: Draw, broken: float, dtype: torch.dtype) -> None:
    """In outputs of its token, and in no other's."""
    x = draw(3, 64)
    x[1, 5] = broken
    weight = pack(Kind(dtype).draw(67, 64, x.device))
    for multiply in (ops.packed_linear, reference.packed_linear):
        assert multiply(x, weight).isfinite().all(1).tolist() == [True, False, True]


def test_gradients_pass_as_if_inputs_were_not_rounded(draw: Draw) -> None:
    x = draw(3, 64).requires_grad_()
    weight = pack(Kind(FP8).draw(67, 64, x.device))
    (1e-4 * reference.packed_linear(x, weight)).sum().backward()
    expected = 1e-4 * dequantize_packed(weight, torch.float32).sum(0).expand(3, -1)
    torch.testing.assert_close(x.grad, expected.to(x.dtype), rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [FP8, PAIRED], ids=str)
@pytest.mark.parametrize("width", [8, 64, 300, 512, 1000])
def test_norms_round_what_they_write(draw: Draw, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (draw(*shape) for shape in ((5, width), (5, width), (width,)))
    found, total = add_rms_norm_rounded(x, residual, weight, 1e-5, dtype, give=True)
    expected, expected_total = add_rms_norm(x, residual, weight, 1e-5)
    normed = found.given_TI
    assert normed is not None
    # Beside stores of bytes, squares are added in another order.
    torch.testing.assert_close(normed, expected, rtol=2**-6, atol=1e-5)
    assert GPU or torch.equal(normed, expected)
    assert torch.equal(total, expected_total)
    assert (found.values.shape[1], found.dtype) == (width, x.dtype)
    unit = normed.float().abs().amax(1) / rounding.LARGEST[dtype]
    torch.testing.assert_close(found.unit_GT[0], unit, rtol=1e-2, atol=0)
    if dtype == FP8:
        check_nearest(found, normed.double(), 1.1)
    else:  # the norm's own rounding is larger
        torch.testing.assert_close(found.plain_TI.to(x.dtype), normed, rtol=1e-2, atol=1e-3)


def with_most(
    name: str, few: Sequence[Any], most: Any, kinds: Sequence[Kind] = KINDS
) -> pytest.MarkDecorator:
    """All kinds of weights with ``few``; and with ``most``, which takes the interpreter seconds, one of each type."""
    some = kinds if GPU else {kind.dtype: kind for kind in reversed(kinds)}.values()
    cases = [*itertools.product(kinds, few), *((kind, most) for kind in some)]
    return pytest.mark.parametrize(("kind", name), cases, ids=str)


@with_most("tokens", [1, 17, *([0, 70] if GPU else [])], 300)
def test_any_number_of_tokens(draw: Draw, kind: Kind, tokens: int) -> None:
    """Rounded before, too."""
    if not GPU and kind.dtype != FP8:
        tokens = min(tokens, 130)  # three tiles; only those of FP8 become others with more
    x = draw(tokens, 264)[:, :256]
    weight, bias = pack(kind.draw(67, 256, x.device)), draw(67)
    assert torch.equal(check(x, weight, bias), ops.packed_linear(rounded(x, weight), weight, bias))


@pytest.mark.parametrize("tokens", [1, 20])
def test_gated_inputs_may_be_rounded_before(draw: Draw, kind: Kind, tokens: int) -> None:
    x = draw(tokens, 304)
    weight = pack(kind.draw(2 * 34, 304, x.device))
    found = ops.packed_linear(rounded(x, weight), weight, None, "silu")
    assert torch.equal(found, ops.packed_linear(x, weight, None, "silu"))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (33, 520), (130, 72)])
def test_any_weight(draw: Draw, kind: Kind, outputs: int, inputs: int) -> None:
    x = draw(3, inputs)
    check(x, pack(kind.draw(outputs, inputs, x.device)))


def test_no_tokens(draw: Draw) -> None:
    weight = pack(KINDS[0].draw(67, 256, draw(1).device))
    check(draw(0, 256), weight, draw(67))


@with_most("sizes", [(1, 64), (20, 33)], (130, 70))
def test_gated(draw: Draw, kind: Kind, sizes: tuple[int, int]) -> None:
    tokens, inner = sizes
    x = draw(tokens, 304)
    check(x, pack(kind.draw(2 * inner, 304, x.device)), draw(2 * inner), "gelu_tanh")


@with_most("inputs", [15 * 128 + 40], 16 * 128)
def test_programs_that_share_a_tile_give_the_bits_of_one(draw: Draw, kind: Kind, inputs: int) -> None:
    """Of several ranges, the last of which may have fewer steps."""
    x = draw(5, inputs)
    weight, bias = pack(kind.draw(70, inputs, x.device)), draw(70)
    cut = ops.ranges(weight, gated=False)
    found = []
    for parts in (1, cut):
        block = ops.launch_config(weight, 5, False, H200)._replace(parts=parts)
        with patch.object(ops, "launch_config", return_value=block):
            found.append(check(x, weight, bias))
    assert cut > 1
    assert torch.equal(*found)
    assert not tickets(64, x.device).any()


def packed_shapes(outputs: int, inputs: int, kind: Kind) -> Packed:
    numbers = kind.draw(1, inputs, torch.device("cpu"))
    packed = pack(numbers._replace(rows=1, scale_SG=numbers.scale_SG[:1]))
    return packed._replace(values=packed.values.expand(outputs, -1))


def test_ranges_are_the_weights() -> None:
    """Neither tokens nor the device decide them; wide weights fill a device without, and long ones have several."""

    def ranges(outputs: int, inputs: int, gated: bool = False, dtype: torch.dtype = FP8) -> int:
        return ops.ranges(packed_shapes(outputs, inputs, Kind(dtype)), gated)

    assert ranges(4096, 4096) == ranges(4096, 14336) == 2
    assert ranges(6144, 4096) == ranges(28672, 4096, True) == 1
    assert ranges(16384, 53248) == 7
    assert ranges(64, 512) == ranges(64, 4096, True) == 1
    assert [ranges(outputs, 4096, False, INT4) for outputs in (4096, 6144, 10240)] == [8, 4, 2]


@pytest.mark.parametrize("shared_bytes", [101_376, 166_912, 232_448], ids=["sm_89", "sm_80", "sm_90"])
@pytest.mark.parametrize("gated", [False, True])
def test_every_shared_memory_holds_it(kind: Kind, gated: bool, shared_bytes: int) -> None:
    for outputs in (4096, 28672):
        weight = packed_shapes(outputs, 4096, kind)
        for tokens in (1, 16, 17, 64, 65, 256, 257, 5000):
            block = ops.launch_config(weight, tokens, gated, Limits(132, shared_bytes))
            bits = 8 if tokens >= ops.CONVERT_FROM and not kind.floats else weight.bits
            columns = block.tokens * (1 if kind.dtype == FP8 else 2)
            rows = block.outputs * (2 if gated else 1) * bits // 8
            assert block.stages * block.inputs * (columns + rows) <= shared_bytes
            assert block.stages >= 2


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_every_number_is_itself() -> None:
    """All bytes of int8, all nibbles in all places, all scales of floats: by the identity."""
    device = torch.device("cuda")
    eye = torch.eye(256, dtype=torch.bfloat16, device=device)
    code = torch.arange(256, dtype=torch.uint8, device=device)
    for values in (code.view(INT8), code & 15, code >> 4):
        row = values.view(1, -1).expand(64, -1).contiguous()
        for zeros in (False, True) if values.dtype == INT4 else (False,):
            zero = torch.full((64, 1), 3, dtype=torch.uint8, device=device) if zeros else None
            weight = pack(Numbers(row, torch.ones(64, 1, device=device), zero))
            found = ops.packed_linear(eye, weight)
            assert torch.equal(found, dequantize_packed(weight, torch.bfloat16).T)
    for group, dtype in itertools.product((16, 32), (torch.bfloat16, torch.float16)):
        values = torch.randint(0, 16, (64, 256), dtype=torch.uint8, device=device)
        scale = torch.randint(8, 16, (64, 256 // group), device=device) * 2.0 ** torch.arange(
            -256 // group // 2, 256 // group // 2, device=device
        )
        weight = pack(Numbers(values, scale, None, group, floats=True))
        assert torch.equal(ops.packed_linear(eye.to(dtype), weight), dequantize_packed(weight, dtype).T)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [
        (6144, 4096, None),
        (4096, 4096, None),
        (28672, 4096, "silu"),
        (4096, 14336, None),
        (1536, 200, "gelu_tanh"),
        (1024, 29568, None),
    ],
)
@pytest.mark.parametrize("kind", [*KINDS[:5], *KINDS[6:8]], ids=str)
def test_same_bits_for_all_numbers_of_tokens(outputs: int, inputs: int, gated: Gate, kind: Kind) -> None:
    """A token's row, alone and with up to 299 others and more."""
    weight = pack(kind.draw(outputs, inputs, torch.device("cuda")))
    draws = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(5000, inputs, device="cuda", generator=draws).bfloat16()
    right = torch.cat([ops.packed_linear(x[i : i + 1], weight, None, gated) for i in range(300)])
    for tokens in (*range(1, 301), 511, 512, 513, 777, 1024, 2048, 2049, 5000):
        count = min(tokens, 300)
        found = ops.packed_linear(x[:tokens], weight, None, gated)
        assert torch.equal(found[:count], right[:count]), tokens


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("outputs", "inputs"), [(28672, 4096), (4096, 14336)])
@pytest.mark.parametrize("tokens", [3, 200])
def test_error_is_a_roundings(outputs: int, inputs: int, tokens: int, kind: Kind) -> None:
    """Against sums in float64, of rounded inputs if they are in FP8: little more than rounding to bfloat16."""
    weight = pack(kind.draw(outputs, inputs, torch.device("cuda")))
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    read = round_inputs(x, FP8).plain_TI if kind.dtype == FP8 else x
    exact = read.double() @ dequantize_packed(weight, torch.float64).T
    found = ops.packed_linear(x, weight)
    assert float((found.double() - exact).norm() / exact.norm()) < (3e-3 if kind.dtype == FP8 else 2e-3)


@with_most(
    "sizes",
    [(5, 34, 256, None), (5, 34, 256, "silu")],
    (70, 70, 15 * 128 + 40, "silu"),
    [each for each in KINDS if each.dtype == INT4],
)
def test_converted_first(device: torch.device, kind: Kind, sizes: tuple[int, int, int, Gate]) -> None:
    """As for prompts: the same bits."""
    tokens, outputs, inputs, gated = sizes
    weight = pack(kind.draw(outputs, inputs, device))
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    with patch.object(ops, "CONVERT_FROM", 1):
        found = ops.packed_linear(x, weight, None, gated)
    with patch.object(ops, "CONVERT_FROM", 10**6):
        assert torch.equal(found, check(x, weight, None, gated))


@pytest.mark.parametrize(("tokens", "inner", "dtype"), [(1, 64, PAIRED), (5, 34, FP8), (20, 34, PAIRED)])
def test_gates_are_rounded(draw: Draw, kind: Kind, tokens: int, inner: int, dtype: torch.dtype) -> None:
    x = draw(tokens, 304)
    weight, bias = pack(kind.draw(2 * inner, 304, x.device)), draw(2 * inner)
    found = ops.gate_rounded(x, weight, bias, dtype)
    expected = round_inputs(ops.packed_linear(x, weight, bias, "silu"), dtype)
    assert found.dtype == x.dtype
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.unit_GT, expected.unit_GT)


def check_in_a_graph(weight: Packed, counts: tuple[int, ...]) -> None:
    """The bits of the kernel for all GPUs, when replayed 20 times, after launches that write the inputs."""
    device, (outputs, inputs) = weight.values.device, (len(weight.values), weight.inputs)
    bias = torch.randn(outputs, device=device).bfloat16()
    x = torch.randn(max(counts), inputs, device=device).bfloat16()
    multiply = partial(ops.packed_linear, weight=weight, bias_O=bias)
    found = []
    with patch.object(ops, "for_packed", return_value="packed"):
        expected = [multiply(x[:tokens]) for tokens in counts]
    for tokens in counts:
        multiply(x[:tokens].clone())
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        for tokens in counts:
            found.append([multiply(x[:tokens].clone()) for _ in range(3)])
    for _ in range(20):
        graph.replay()
    for right, each in zip(expected, found, strict=True):
        assert all(torch.equal(one, right) for one in each)
    assert not tickets(64, device).any()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(4, 16), (68, 200), (132, 72), (100, 520), (4096, 4096), (1028, 14336), (256, 29568)],
)
def test_weights_that_come_before_the_wait(outputs: int, inputs: int, kind: Kind) -> None:
    weight = pack(kind.draw(outputs, inputs, torch.device("cuda")))
    streamed = ops.for_packed(weight, 1, inputs) == "streamed"
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert streamed == (weight.step == 128 and not weight.floats and hopper)
    check_in_a_graph(weight, (1, 3, 8, 16, 17))


WIDE_KINDS = [
    Kind(INT8),
    Kind(INT8, 128, scales=torch.bfloat16),
    Kind(INT4, 128),
    Kind(INT4, 128, scales=torch.bfloat16),
    Kind(INT4, 256, zeros=True, scales=torch.float16),
    Kind(INT4, zeros=True),
]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("outputs", "inputs", "parts", "counts"),
    [
        (28672, 4096, 1, (65, 128, 8192)),
        (28420, 4040, 1, (70, 200)),
        (37888, 3584, 1, (513,)),
        (16384, 4096, 2, (33, 64)),
        (8192, 8192, 4, (48,)),
        (4036, 14320, 7, (50, 64)),
        (3584, 18944, 8, (64,)),
        (4096, 4096, 8, (33, 64)),
        (2048, 16384, 16, (64,)),
    ],
)
@pytest.mark.parametrize("kind", WIDE_KINDS, ids=str)
def test_specialized_warps(
    outputs: int, inputs: int, parts: int, counts: tuple[int, ...], kind: Kind
) -> None:
    """With one range of inputs, and with several, whose programs wait for each other; the last may be shorter."""
    weight = pack(kind.draw(outputs, inputs, torch.device("cuda")))
    share = ops.share_of(weight, gated=False)
    assert -(-inputs // share) == parts
    # private: on other devices, and where another kernel is faster
    with patch.object(choose, "_FILLED", 0.5):
        if not all(ops.for_packed(weight, tokens, share) == "specialized" for tokens in counts):
            pytest.skip("not on this device")
        check_in_a_graph(weight, counts)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(34816, 5120), (17500, 1000), (5120, 17408), (4100, 1160), (1100, 6200)]
)
def test_specialized_warps_in_fp8(outputs: int, inputs: int) -> None:
    """Programs share tiles, multiply several ranges of inputs, or have one each."""
    weight = pack(Kind(FP8, 128, 128).draw(outputs, inputs, torch.device("cuda")))
    if ops.for_packed(weight, 65, inputs) != "specialized":
        pytest.skip("not on this device")
    check_in_a_graph(weight, (65, 128, 200, 300, 2000))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", WIDE_KINDS, ids=str)
@pytest.mark.parametrize("tokens", [1, 20, 64, 600])
def test_wide_gates_are_rounded(tokens: int, kind: Kind) -> None:
    """To the bits of the kernel that multiplies them by what they gate."""
    x = torch.randn(tokens, 4096, device="cuda").bfloat16()
    weight = pack(kind.draw(28672, 4096, x.device))
    found = ops.gate_rounded(x, weight, None, PAIRED)
    expected = round_inputs(ops.packed_linear(x, weight, None, "silu"), PAIRED)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.unit_GT, expected.unit_GT)


def test_who_multiplies_with_specialized_warps() -> None:
    """4-bit weights that fill an H200, from 17 tokens on, int8 from 65; with several ranges of inputs only as many
    programs as fit. FP8 with scales of blocks from 65."""

    def specializes(outputs: int, inputs: int, tokens: int, kind: Kind = KINDS[6]) -> bool:
        weight = packed_shapes(outputs, inputs, kind)._replace(rows=kind.rows)
        with patch.object(choose, "INTERPRETED", False):
            share = ops.share_of(weight, gated=False)
            return ops.for_packed(weight, tokens, share) == "specialized"

    assert [specializes(28672, 4096, tokens) for tokens in (16, 17, 64, 65, 8192)] == [False, *4 * [True]]
    assert [specializes(28672, 4096, tokens, Kind(INT8)) for tokens in (64, 65)] == [False, True]
    assert [specializes(37888, 3584, tokens) for tokens in (64, 511, 512)] == [False, False, True]
    for inputs in (4096, 14336):
        assert [specializes(4096, inputs, tokens) for tokens in (32, 33, 64, 65)] == [
            False,
            True,
            True,
            False,
        ]
    assert not any(specializes(outputs, 4096, 64) for outputs in (1024, 6144))
    assert not any(specializes(28672, 4096, 64, kind) for kind in (Kind(FP8, 64, 48), Kind(INT4, 64)))
    assert [specializes(1024, 4096, tokens, FP8_KINDS[1]) for tokens in (64, 65)] == [False, True]
    assert not specializes(28672, 4096, 128, Kind(FP8))


@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens", "chosen"),
    [
        (16384, 5120, 65, (128, 1)),
        (16384, 5120, 256, (256, 1)),  # the same tiles, of which one takes less than two
        (5120, 17408, 128, (128, 3)),  # programs have a range each
        (5120, 6144, 256, (128, 1)),  # where they have all of few, as large tiles would have them
        (5120, 17408, 300, (128, 1)),  # 120 tiles, or 80 large ones
        (8192, 14336, 200, (256, 2)),
        (28672, 8192, 2048, (256, 1)),
        (5120, 17408, 2048, (128, 1)),  # five turns instead of three of large tiles
    ],
)
def test_tiles_of_specialized_warps(outputs: int, inputs: int, tokens: int, chosen: tuple[int, int]) -> None:
    """In FP8, as they are fastest on an H200."""
    weight = packed_shapes(outputs, inputs, Kind(FP8))
    block = choose.specialized_config(weight, tokens, ops.share_of(weight, gated=False), H200)
    assert (block.tokens, block.parts) == chosen
