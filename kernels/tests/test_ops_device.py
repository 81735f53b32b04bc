"""What is launched on which device: tiles and stages by its shared memory, splits by its multiprocessors."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from specserve_kernels.ops import device
from specserve_kernels.ops.attention import prefill
from specserve_kernels.ops.attention.launch_plan import LaunchPlan
from specserve_kernels.ops.attention.splits import NEAR
from specserve_kernels.ops.device import H200, Limits, limits_of
from specserve_kernels.ops.linear import choose, linear

A100, L4, RTX5090, T4 = Limits(108, 166_912), Limits(58, 101_376), Limits(170, 101_376), Limits(40, 65_536)
CPU = torch.device("cpu")


def test_the_interpreter_sees_an_h200() -> None:
    assert limits_of(CPU) == H200 == (132, 232_448)


@pytest.mark.gpu
def test_limits_of_a_device() -> None:
    found = limits_of(torch.device("cuda"))
    assert found == limits_of(torch.device("cuda", torch.cuda.current_device()))
    assert found.shared_bytes >= 65_536
    assert found.processors > 0


@pytest.mark.parametrize(
    ("limits", "outputs", "chosen"),
    [
        (H200, 4224, (32, 512, 4)),
        (H200, 4225, (32, 128, 5)),
        (H200, 8448, (32, 128, 5)),
        (H200, 12288, (32, 128, 4)),
        (H200, 28672, (32, 128, 3)),
        (A100, 3456, (32, 512, 4)),
        (A100, 4096, (32, 128, 5)),
        (RTX5090, 4096, (32, 512, 3)),
        (L4, 28672, (32, 128, 3)),
        (T4, 1024, (32, 512, 2)),
        (Limits(40, 49_152), 1024, (32, 512, 2)),
        (Limits(40, 49_151), 1024, None),
    ],
)
def test_linear(limits: Limits, outputs: int, chosen: tuple[int, int, int] | None) -> None:
    launch = linear.launch_config(outputs, limits)
    assert (launch and (launch.outputs, launch.inputs, launch.stages)) == chosen


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "chosen"),
    [
        (9, 28672, 4096, (16, 128, 128, 3, 4)),
        (17, 28672, 4096, (32, 256, 64, 4, 8)),
        (64, 128256, 4096, (64, 256, 64, 4, 8)),
        (32, 6144, 4096, (32, 64, 128, 5, 4)),
        (64, 6144, 4096, (64, 64, 128, 4, 4)),
        (100, 28672, 4096, (128, 128, 64, 3, 4)),
    ],
)
def test_swap_ab_linear(tokens: int, outputs: int, inputs: int, chosen: tuple[int, ...]) -> None:
    assert choose.swap_ab_config(outputs, inputs, tokens, False, H200)[:5] == chosen
    if tokens > 16:  # no two on one multiprocessor, but of more tokens
        assert (2 * held(choose.LaunchConfig(*chosen)) > H200.shared_bytes) == (tokens <= 64)
    for shared in (H200.shared_bytes, 101_376):
        block = choose.swap_ab_config(outputs, inputs, tokens, False, Limits(132, shared))
        assert held(block) < shared


def held(block: choose.LaunchConfig) -> int:
    """Bytes of shared memory."""
    return 2 * block.stages * (block.tokens + block.outputs) * block.inputs


def test_where_the_swap_ab_linear_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(tokens: int, outputs: int, inputs: int, biased: bool = False) -> str:
        x, weight = (
            torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta") for rows in (tokens, outputs)
        )
        gated = outputs in (28672, 22528)
        return choose.for_plain(x, weight, x[0, :0] if biased else None, gated)

    def serves(tokens: int, outputs: int, inputs: int) -> bool:
        return kernel(tokens, outputs, inputs) == "swap_ab"

    qkv, o, gate_up, down, head = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)
    few = 1536, 4096
    assert not any(
        serves(tokens, *each) for tokens in (1, 8, 65, 96, 129) for each in (qkv, o, gate_up, down, head, few)
    )
    for tokens in (9, 16):
        assert [serves(tokens, *each) for each in (qkv, o, gate_up, down, head)] == [
            *(False, False, True, False, True)
        ]
    for tokens in (17, 32, 33, 64):  # 4,096 outputs are 64 programs
        assert [serves(tokens, *each) for each in (qkv, o, gate_up, down, head)] == [
            *(True, False, True, False, True)
        ]
        assert all(serves(tokens, *each) for each in (few, (1792, 5120), (1024, 3072)))
        assert not any(serves(tokens, *each) for each in ((4096, 1024), (1280, 2048), (128, 4096)))
        assert all(serves(tokens, *each) == (tokens <= 32) for each in ((2048, 4096), (3072, 4096)))
        assert [kernel(tokens, *each, biased=True) for each in ((1152, 3584), (4608, 3584))] == [
            *("few", "cublas")
        ]
    assert [serves(tokens, 1024, 4096) for tokens in (16, 17, 96, 97)] == [False, True, True, False]
    assert kernel(65, 1152, 3584, biased=True) == "cublas"
    for tokens in (97, 128):
        assert [serves(tokens, *each) for each in (qkv, o, gate_up, down, head)] == [
            *(False, False, True, False, False)
        ]
        assert not serves(tokens, 22528, 4096)  # a gate of 176 tiles, for 264 places
    # A second wave of few programs, or too few for one: 37,888 outputs are 148, 10,240 are 160, 16,384 are 64.
    assert not any(serves(32, *each) for each in ((37888, 3584), (10240, 8192), (16384, 2048), (512, 1024)))
    assert not serves(20, 4096, 100)  # rows that the copy engine can't read
    x = torch.empty(20, 4097, dtype=torch.bfloat16)
    assert choose.for_plain(x[:, 1:], x, None, False) != "swap_ab"
    monkeypatch.setattr(choose, "capability_of", lambda _: (10, 0))
    assert not serves(20, *qkv)


def test_linear_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's takes over."""
    monkeypatch.setattr(linear, "limits_of", lambda _: Limits(40, 1000))
    x, weight = torch.randn(3, 64).half(), torch.randn(8, 64).half()
    assert torch.equal(linear.linear(x, weight, None), torch.nn.functional.linear(x, weight))


# Bytes of a key (bf16 head 128, bf16 head 256 or float32 head 128, float32 head 256), nodes of 4 rows each, and what is
# chosen: rows, positions, stages.
TILES = [
    (H200, 256, 8, (32, 64, 3)),
    (H200, 256, 16, (64, 32, 3)),
    (H200, 512, 16, (64, 32, 3)),
    (H200, 1024, 16, (32, 32, 3)),
    (H200, 128, 1, (16, 128, 2)),
    (H200, 1024, 16, (32, 32, 3)),
    (L4, 256, 16, (64, 32, 3)),
    (L4, 1024, 16, (32, 32, 1)),
    (RTX5090, 256, 1, (16, 128, 2)),
    (T4, 256, 1, (16, 64, 1)),
]


@pytest.mark.parametrize(("limits", "row_bytes", "nodes", "chosen"), TILES)
def test_attention(limits: Limits, row_bytes: int, nodes: int, chosen: tuple[int, ...]) -> None:
    plan = LaunchPlan.of(32 if nodes > 1 else 1, nodes, 4, 8, row_bytes, *limits)
    assert (plan.rows, plan.block, plan.stages) == chosen
    assert plan.rows * plan.tiles >= 4 * nodes


@pytest.mark.parametrize(("nodes", "expected"), [(1, (16, 4, 33)), (16, (32, 4, 33)), (32, (64, 8, 16))])
def test_programs_that_fit_by_their_registers(nodes: int, expected: tuple[int, ...]) -> None:
    """Rows, warps and programs of a key head, of heads of 256."""
    plan = LaunchPlan.of(16, nodes, 2, 8, 512, *H200, positions=1 << 17)
    assert (plan.rows, plan.warps, plan.workers) == expected


def test_prefill() -> None:
    for limits in (H200, A100, L4):
        assert prefill.choose_tile(256, False, limits.shared_bytes) == (64, 64, 4, 2)
        assert prefill.choose_tile(512, False, limits.shared_bytes) == (64, 32, 8, 2)
        assert prefill.choose_tile(1024, True, limits.shared_bytes) == (32, 16, 4, 2)
    assert prefill.choose_tile(1024, False, H200.shared_bytes) == (32, 32, 8, 2)
    assert prefill.choose_tile(512, False, T4.shared_bytes) == (32, 16, 4, 2)


@pytest.mark.parametrize(
    ("slots", "nodes", "positions", "workers"),
    [
        (1, 1, 1 << 17, 49),  # three a multiprocessor
        (1, 1, 640, 6),  # no more than units
        (1, 8, 320, 8),  # two tiles of four units
        (49, 1, 1 << 17, 49),
        (64, 1, 1 << 17, 64),  # each tile has one
        (64, 32, 640, 128),
    ],
)
def test_workers(slots: int, nodes: int, positions: int, workers: int) -> None:
    """They fill the device, and no tile waits for another's."""
    plan = LaunchPlan.of(slots, nodes, 4, 8, 256, *H200, positions=positions)
    assert plan.workers == workers
    assert plan.most >= slots * plan.tiles


@pytest.mark.parametrize("nodes", [1, 20])
@pytest.mark.parametrize("window", [80, 128, 1024])
def test_sums_of_a_window(window: int, nodes: int) -> None:
    """There is room for those of all splits that a slot's rows see, wherever the first begins, and for few others."""
    plan = LaunchPlan.of(1, nodes, 1, 1, 256, *H200, positions=1 << 17, window=window)
    seen = [(at + window + nodes - 2) // NEAR - at // NEAR + 1 for at in range(2 * NEAR)]
    assert max(seen) <= plan.most / plan.tiles <= max(seen) + 1
    assert LaunchPlan.of(1, 1, 1, 1, 256, *H200, positions=300, window=window).most <= 300 // NEAR + 2


def test_sums_have_a_bound() -> None:
    """Whatever contexts there may be: units that can't be stored are one program's."""
    for slots, nodes in ((256, 1), (64, 32), (1, 64)):
        plan = LaunchPlan.of(slots, nodes, 4, 8, 256, *H200, positions=1 << 20)
        assert plan.most * 8 * plan.rows * 512 <= max(64 << 20, slots * plan.tiles * 8 * plan.rows * 512)


def test_tickets_stay_where_they_are() -> None:
    """A captured graph still addresses the buffer that a larger launch has outgrown."""
    first = device.tickets(5, CPU)
    assert len(first) > 5
    assert device.tickets(len(first), CPU) is first
    larger = device.tickets(len(first) + 1, CPU)
    assert len(larger) > len(first)
    assert device.tickets(5, CPU) is larger
    capturing = mock.patch("torch.cuda.is_current_stream_capturing", return_value=True)
    with capturing, pytest.raises(RuntimeError, match="before a CUDA graph"):
        device.tickets(1 << 40, torch.device("cuda"))
    outgrown = weakref.ref(first)
    del first
    assert outgrown() is not None
