"""The projection by 8 or 4 bits of inputs that stay as they are: how its weight is ordered, and the kernel against its
reference, in float32 under the interpreter, in all types on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from specserve_kernels import Numbers, Packed, dequantize_packed, pack
from specserve_kernels.ops.device import H200, Limits, tickets
from specserve_kernels.ops.linear import weight_only as ops
from specserve_kernels.reference.linear import weight_only as reference
from torch import Tensor

GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class Kind:
    """Of a weight. ``group`` 0: all inputs."""

    dtype: torch.dtype
    group: int = 0
    rows: int = 1
    zeros: bool = False
    scales: torch.dtype = torch.float32

    def __str__(self) -> str:
        parts = (
            str(self.dtype)[6:],
            self.group or "all",
            self.rows,
            "zeros" if self.zeros else "",
            str(self.scales)[6:],
        )
        return "-".join(map(str, filter(None, parts)))

    def draw(self, outputs: int, inputs: int, device: torch.device) -> Numbers:
        """Numbers of all sizes, so that products are of about 1."""
        draws = torch.Generator().manual_seed(outputs + inputs)
        low, high, largest = (0, 16, 8.0) if self.dtype == torch.uint8 else (-128, 128, 74.0)
        values = torch.randint(low, high, (outputs, inputs), generator=draws).to(self.dtype)
        groups = -(-inputs // self.group) if self.group else 1
        rows = -(-outputs // self.rows)
        scale = (torch.rand(rows, groups, generator=draws) + 0.5) / largest / inputs**0.5
        zero = torch.randint(0, 16, (outputs, groups), generator=draws).to(device, torch.uint8)
        group = self.group or inputs
        return Numbers(
            values.to(device), scale.to(device, self.scales), zero if self.zeros else None, group, self.rows
        )


INT8, INT4 = torch.int8, torch.uint8
KINDS = [
    Kind(INT8),
    Kind(INT8, 128, 128),
    Kind(INT8, 128, 32),
    Kind(INT8, 32),
    Kind(INT4, 128),
    Kind(INT4, 128, scales=torch.float16),
    Kind(INT4, 64, zeros=True, scales=torch.bfloat16),
    Kind(INT8, scales=torch.bfloat16),
    Kind(INT4, 256, zeros=True),
    Kind(INT4, 64, zeros=True),
    Kind(INT4, 32),
    Kind(INT4),
    Kind(INT4, zeros=True),
]


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def by_hand(numbers: Numbers) -> Tensor:
    """The weight in float64, number by number."""
    values, scale, zero, group, rows, _ = numbers
    found = torch.empty(values.shape, dtype=torch.float64)
    for o in range(values.shape[0]):
        for i in range(values.shape[1]):
            g = i // group if scale.shape[1] > 1 else 0
            taken = int(zero[o, g]) if zero is not None else 8 if values.dtype == INT4 else 0
            found[o, i] = (float(values[o, i]) - taken) * float(scale[o // rows, g])
    return found


@pytest.mark.parametrize(("outputs", "inputs"), [(5, 40), (34, 256), (3, 384)])
def test_ordering_loses_nothing(kind: Kind, outputs: int, inputs: int) -> None:
    numbers = kind.draw(outputs, inputs, torch.device("cpu"))
    packed = pack(numbers)
    assert torch.equal(reference.unpack(packed).float(), numbers.values_OI.float())
    expected = by_hand(numbers)
    assert torch.equal(dequantize_packed(packed, torch.float64), expected)
    assert torch.equal(dequantize_packed(packed, torch.bfloat16), expected.float().bfloat16())
    ids = torch.tensor([outputs - 1, 0, 2])
    assert torch.equal(dequantize_packed(packed, torch.float64, ids), expected[ids])
    assert packed.values.nbytes == outputs * -(-inputs // packed.step) * packed.step * packed.bits // 8


def test_a_thread_reads_its_numbers_at_once() -> None:
    """Of a step of 128, bytes 32 to 64 are the second pairs of all halves of sixteens."""
    values = torch.arange(128, dtype=torch.int8)[None]
    packed = pack(Numbers(values, torch.ones(1, 1)))
    mine = [16 * k + 8 * h + 2 + b for k in range(8) for h in range(2) for b in range(2)]
    assert packed.values[0, 32:64].tolist() == mine


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
    found = ops.weight_only_linear(x, packed).double().cpu()
    torch.testing.assert_close(found, x.double().cpu() @ expected.T, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("group", [16, 48, 192])
def test_groups_that_do_not_fit_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {group} inputs; accepted are 32, 64, "):
        pack(Kind(INT4, group).draw(2, 384, torch.device("cpu")))


def check(x: Tensor, weight: Packed, bias: Tensor | None = None, gated: bool = False) -> None:
    """Gated, two sums are rounded ahead of their product: each may be rounded the other way."""
    found = ops.weight_only_linear(x, weight, bias, gated)
    expected = reference.weight_only_linear(x, weight, bias, gated)
    assert found.dtype == x.dtype
    tolerance = (1 + (gated and x.dtype != torch.float32)) * TOLERANCE[x.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 33, 70])
def test_any_number_of_tokens(draw: Draw, kind: Kind, tokens: int) -> None:
    x = draw(tokens, 264)[:, :256]
    check(x, pack(kind.draw(67, 256, x.device)), draw(67))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (33, 520), (130, 64)])
def test_any_weight(draw: Draw, kind: Kind, outputs: int, inputs: int) -> None:
    x = draw(3, inputs)
    check(x, pack(kind.draw(outputs, inputs, x.device)))


@pytest.mark.parametrize(("tokens", "inner"), [(1, 64), (20, 33)])
def test_gated(draw: Draw, kind: Kind, tokens: int, inner: int) -> None:
    x = draw(tokens, 300)
    check(x, pack(kind.draw(2 * inner, 300, x.device)), draw(2 * inner), gated=True)


@pytest.mark.parametrize("inputs", [16 * 128, 15 * 128 + 40])
def test_programs_that_share_a_tile_give_the_bits_of_one(draw: Draw, kind: Kind, inputs: int) -> None:
    """Of four ranges, the last of which may have fewer steps."""
    x = draw(5, inputs)
    weight = pack(kind.draw(70, inputs, x.device))
    assert ops.ranges(70, inputs, weight.step) == 4
    found = []
    for parts in (1, 4):
        with patch.object(ops, "pipeline", return_value=ops.Pipeline(8, 64, 3, 4, parts)):
            check(x, weight, draw(70))
            found.append(ops.weight_only_linear(x, weight))
    assert torch.equal(*found)
    assert not tickets(64, x.device).any()


def test_ranges_are_the_weights() -> None:
    """Neither tokens nor the device decide them; wide weights fill a device without."""
    assert ops.ranges(4096, 4096, 128) == ops.ranges(6144, 4096, 128) == ops.ranges(4096, 14336, 128) == 4
    assert ops.ranges(10240, 8192, 128) == 2
    assert ops.ranges(28672, 4096, 128) == ops.ranges(64, 512, 128) == 1
    assert ops.ranges(64, 1024, 128) == 2


def packed_shapes(outputs: int, inputs: int, kind: Kind) -> Packed:
    numbers = kind.draw(1, inputs, torch.device("cpu"))
    packed = pack(numbers._replace(rows=1, scale_SG=numbers.scale_SG[:1]))
    return packed._replace(values=packed.values.expand(outputs, -1))


@pytest.mark.parametrize("shared_bytes", [101_376, 166_912, 232_448], ids=["sm_86", "sm_80", "sm_90"])
@pytest.mark.parametrize("input_bytes", [2, 4])
def test_every_shared_memory_holds_it(kind: Kind, input_bytes: int, shared_bytes: int) -> None:
    for outputs in (4096, 28672):
        weight = packed_shapes(outputs, 4096, kind)
        for tokens in (1, 16, 17, 64, 65, 128, 1000):
            block = ops.pipeline(weight, tokens, input_bytes, Limits(132, shared_bytes))
            stage = weight.step * (block.tokens * input_bytes + block.outputs * weight.bits // 8)
            converted = weight.step * block.outputs * input_bytes if weight.bits == 4 else 0
            assert max(block.stages * stage, (block.stages - 1) * stage + converted) <= shared_bytes
            assert block.stages >= 2 or shared_bytes == 101_376


def test_few_outputs_are_shared_by_many_programs() -> None:
    square = packed_shapes(4096, 4096, Kind(INT8))
    parts = [ops.pipeline(square, tokens, 2, H200).parts for tokens in (1, 64, 128, 256, 2048)]
    assert parts == [4, 4, 4, 4, 1]
    assert ops.pipeline(packed_shapes(28672, 4096, Kind(INT8)), 1, 2, H200).parts == 1


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_is_itself(dtype: torch.dtype) -> None:
    """All bytes of int8, all nibbles in all places: by the identity."""
    device = torch.device("cuda")
    eye = torch.eye(256, dtype=dtype, device=device)
    code = torch.arange(256, dtype=torch.uint8, device=device)
    for values in (code.view(INT8), code & 15, code >> 4):
        row = values.view(1, -1).expand(64, -1).contiguous()
        for zeros in (False, True) if values.dtype == INT4 else (False,):
            zero = torch.full((64, 1), 3, dtype=torch.uint8, device=device) if zeros else None
            weight = pack(Numbers(row, torch.ones(64, 1, device=device), zero))
            found = ops.weight_only_linear(eye, weight)
            assert torch.equal(found, dequantize_packed(weight, dtype).T)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [(6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (1536, 200, True)],
)
@pytest.mark.parametrize("kind", [*KINDS[:2], *KINDS[4:7]], ids=str)
def test_same_bits_for_all_numbers_of_tokens(outputs: int, inputs: int, gated: bool, kind: Kind) -> None:
    """A token's row, alone and with up to 299 others and more."""
    weight = pack(kind.draw(outputs, inputs, torch.device("cuda")))
    draws = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2048, inputs, device="cuda", generator=draws).bfloat16()
    right = torch.cat([ops.weight_only_linear(x[i : i + 1], weight, None, gated) for i in range(300)])
    for tokens in (*range(1, 301), 511, 512, 513, 777, 1024, 2048):
        count = min(tokens, 300)
        found = ops.weight_only_linear(x[:tokens], weight, None, gated)
        assert torch.equal(found[:count], right[:count]), tokens


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(5, 34, 256), (300, 70, 15 * 128 + 40)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", [each for each in KINDS if not (each.group or each.zeros)], ids=str)
def test_converted_first(
    device: torch.device, kind: Kind, tokens: int, outputs: int, inputs: int, gated: bool
) -> None:
    """In 16 bits, as for prompts. That the bits stay the same, ``test_same_bits_for_all_numbers_of_tokens`` shows."""
    numbers = kind.draw(outputs, inputs, device)
    weight = pack(numbers)
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    with patch.object(ops, "CONVERT_FROM", 1):
        check(x, weight, None, gated)
    exact = numbers.values_OI.float() - (8 if kind.dtype == INT4 else 0)
    assert torch.equal(ops.convert(weight, torch.float16)[:, :inputs].float(), exact)


def test_zero_points_of_a_single_step_are_subtracted_once(device: torch.device) -> None:
    """A weight with as few inputs has no groups, and zero points all the same."""
    weight = pack(Kind(INT4, zeros=True).draw(64, 96, device))
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    with patch.object(ops, "CONVERT_FROM", 1):
        check(x, weight)
