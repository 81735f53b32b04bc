"""Packed weights give the plain layer's results and are used where intended."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from specserve_kernels import Gate, linear_ahead
from torch import nn

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import MLP
from specserve.layers.linear import Linear, add_in_order, pack_linears
from specserve.layers.norms import RMSNorm

CONFIG = LayerConfig(64, 128, 4, 2, 16, 1e-5, 64)


HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("rows", [1, 6, 48])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(rows: int, bias: bool, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not HAS_BFLOAT16:
        pytest.skip("oneDNN has no bfloat16 on this processor")
    torch.manual_seed(rows)
    layer, x = Linear(96, 40, bias=bias).to(dtype), torch.randn(rows, 96).to(dtype)
    with torch.inference_mode():
        plain = nn.functional.linear(x.double(), *(p.double() for p in layer.parameters()))
        pack_linears(layer)
        assert layer.packed is not None
        found = layer(x)
        error = 1e-5 if dtype == torch.float32 else 2**-8
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), plain, rtol=error, atol=error)
    assert layer.weight.numel() == 0


def test_non_contiguous_input() -> None:
    layer, x = Linear(32, 8, bias=False), torch.randn(32, 5).t()
    with torch.inference_mode():
        plain = layer(x)
        pack_linears(layer)
        torch.testing.assert_close(layer(x), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_what_onednn_does_not_multiply_stays_plain(dtype: torch.dtype) -> None:
    layer = Linear(16, 8).to(dtype)
    with patch.object(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", return_value=False):
        pack_linears(layer)
    assert layer.packed is None
    assert layer(torch.ones(1, 16, dtype=dtype)).shape == (1, 8)


def test_shared_and_named_weights_are_kept() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(8, 16),
            "head": Linear(16, 8, bias=False),
            "qkv": Linear(16, 8),
            "out": Linear(16, 8),
        }
    )
    model["head"].weight = model["embed"].weight
    pack_linears(model, keep=["qkv"])
    assert model["head"].weight is model["embed"].weight
    assert model["embed"].weight.numel() == 128
    assert model["qkv"].weight.numel() == 128
    assert model["out"].weight.numel() == 0
    assert all(model[name].packed is not None for name in ("head", "qkv", "out"))


@pytest.mark.gpu
def test_what_is_trained_on_a_gpu_has_gradients() -> None:
    """The kernels give none, so the references compute."""
    mlp = MLP(CONFIG, 0).cuda()
    x = torch.randn(5, 64, device="cuda")
    RMSNorm(64, 1e-5).cuda()(mlp(x, x)[0]).square().sum().backward()
    found = {name: p.grad for name, p in mlp.named_parameters()}
    assert found.keys() == {"gate_up_proj.weight", "down_proj.weight"}
    on_cpu = MLP(CONFIG, 0)
    on_cpu.load_state_dict(mlp.state_dict())
    RMSNorm(64, 1e-5)(on_cpu(x.cpu(), x.cpu())[0]).square().sum().backward()
    for name, p in on_cpu.named_parameters():
        grad = found[name]
        assert grad is not None
        assert p.grad is not None
        torch.testing.assert_close(grad.cpu(), p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "biased"),
    [
        *((outputs, inputs, None, False) for outputs, inputs in ((6144, 4096), (4096, 4096), (4096, 14336))),
        *((outputs, inputs, None, False) for outputs, inputs in ((128256, 4096), (384, 256), (256, 768))),
        *((28672, 4096, "silu", False), (30720, 3840, "gelu_tanh", False), (1536, 256, "silu", False)),
        *(
            (2304, 3072, None, False),
            (1536, 4096, None, False),
            (1024, 3072, None, False),
            (1152, 3584, None, True),
            (96, 5120, None, False),
            (2880, 4096, None, True),
            (5120, 5120, None, True),
        ),
    ],
)
def test_same_bits_for_all_numbers_of_tokens(outputs: int, inputs: int, gated: Gate, biased: bool) -> None:
    add_in_order()
    draws = torch.Generator("cuda").manual_seed(0)
    most = 8192 if outputs < 100_000 else 512
    x = torch.randn(most, inputs, device="cuda", generator=draws).bfloat16()
    weight = (torch.randn(outputs, inputs, device="cuda", generator=draws) / inputs**0.5).bfloat16()
    layer = Linear.of(weight, x[0, :outputs].clone() if biased else None)
    right = torch.cat([layer(x[i : i + 1], gated) for i in range(40)])
    sizes = [*range(2, 40), 48, 63, 64, 65, 96, 97, 100, 127, 128, 129, 200, 256, 300, 511, 512]
    for tokens in [*sizes, *(n for n in (640, 777, 1024, 1500, 2048, 3000, 4096, 8192) if n <= most)]:
        count = min(tokens, 40)
        assert torch.equal(layer(x[:tokens], gated)[:count], right[:count]), tokens
        if outputs < 128:
            assert torch.equal(linear_ahead(x[:tokens], weight)[:count], right[:count]), tokens
